"""A small OpenAI-like server with faults to plant, on a model that is arithmetic."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCAB = 64
WORDS = [f"w{i}" for i in range(VOCAB)]


class Tokenizer:
    """Words `w0`..`w63`; every other word is one of them by its length."""

    chat_template = "{{ messages }}"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.id(word) for word in text.split()]}

    def id(self, word: str) -> int:
        return WORDS.index(word) if word in WORDS else (7 * len(word) + ord(word[0])) % VOCAB

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(WORDS[i] for i in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, 2, *self(messages[0]["content"])["input_ids"], 3]}


class Model:
    """Logits that depend on all tokens; `shift` is a fault."""

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = shift

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        rows = []
        for end in range(1, len(ids) + 1):
            seed = sum((i + 1) * (t + 3) for i, t in enumerate(ids[:end])) % 9973
            rows.append(np.random.default_rng(seed).standard_normal(VOCAB, np.float32) * 3)
        logits = np.stack(rows)
        logits[:, ::2] += self.shift
        return logits

    def greedy(self, ids: Sequence[int], steps: int) -> list[int]:
        known = list(ids)
        for _ in range(steps):
            known.append(int(self.logits(known)[-1].argmax()))
        return known


@dataclass
class Faults:
    """What is wrong with the server."""

    tokens: Callable[[list[int]], list[int]] = lambda ids: ids  # what the tokenizer adds
    chat: Callable[[list[int]], list[int]] = lambda ids: ids
    model: Any = field(default_factory=Model)
    choose: Callable[[np.ndarray], int] = lambda row: int(row.argmax())
    logprobs: bool = True
    ids: bool = True
    usage: bool = True
    ends_after: int = 1000
    asked_to_go_on: bool = False  # set by a request that says ignore_eos
    status: int = 200
    raw: bytes = b""


@contextmanager
def server(faults: Faults, tokenizer: Any = None) -> Iterator[str]:
    """The server's address while it runs."""
    tokenizer = tokenizer or Tokenizer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def reply(self, status: int, body: Any) -> None:
            data = faults.raw or json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError):  # the client gave up
                self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(faults.status, {"data": [{"id": "fake"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "messages" in body:
                given = tokenizer.apply_chat_template(body["messages"], tokenize=True)["input_ids"]
                self.reply(200, answer(faults, tokenizer, faults.chat(list(given)), body))
                return
            prompt = body["prompt"]
            if body.get("logprobs") and not faults.logprobs:
                self.reply(400, {"error": "logprobs are not supported"})
            elif isinstance(prompt, list) and not faults.ids:
                self.reply(400, {"error": "prompt must be a string"})
            else:
                ids = prompt
                if isinstance(prompt, str):
                    ids = faults.tokens(list(tokenizer(prompt)["input_ids"]))
                self.reply(200, answer(faults, tokenizer, ids, body))

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()


def answer(faults: Faults, tokenizer: Any, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
    known, top, chosen = list(ids), [], []
    faults.asked_to_go_on |= bool(body.get("ignore_eos"))
    for _ in range(min(body["max_tokens"], faults.ends_after)):
        row = faults.model.logits(known)[-1].astype(np.float64)
        row = row - row.max() - np.log(np.exp(row - row.max()).sum())
        token = faults.choose(row)
        best = np.argsort(row)[::-1][: body.get("logprobs") or 1]
        top.append({tokenizer.decode([int(i)]): float(row[i]) for i in best})
        chosen.append(float(row[token]))
        known.append(token)
    text = tokenizer.decode(known[len(ids) :], skip_special_tokens=True)
    choice: dict[str, Any] = {"text": text, "finish_reason": "length"}
    choice["message"] = {"content": text}
    if body.get("logprobs"):
        choice["logprobs"] = {"top_logprobs": top, "token_logprobs": chosen}
    made: dict[str, Any] = {"choices": [choice]}
    if faults.usage:
        made["usage"] = {"prompt_tokens": len(ids)}
    return made
