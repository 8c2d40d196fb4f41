"""The OpenAI-compatible HTTP API of a MAX server, as far as comparing needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

from maxport.errors import MaxportError


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: The generated text.
        prompt_tokens: How many tokens the server made of the prompt; None if it does not say.
        top: For each generated token the most likely tokens' texts and log probabilities; empty
            if the server gives none.
        chosen: The log probability of each generated token.
        finish: Why it ended.
    """

    text: str
    prompt_tokens: int | None
    top: tuple[dict[str, float], ...] = ()
    chosen: tuple[float, ...] = ()
    finish: str = ""


@dataclass
class Server:
    """A server at an address.

    Args:
        url: Such as `http://localhost:8000`.
        timeout_s: Seconds one answer may take.
        model: The name the server gives its model; asked for when first needed.
    """

    url: str
    timeout_s: float = 120.0
    model: str = ""
    gives_logprobs: bool = field(default=True, init=False)
    _http: httpx.Client = field(default_factory=httpx.Client, init=False, repr=False)

    def healthy(self) -> bool:
        """Whether the server answers and has loaded its model."""
        try:
            return self._http.get(f"{self.url}/v1/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def model_name(self) -> str:
        """The first model the server lists.

        Raises:
            MaxportError: Nothing answers, or it is no OpenAI-compatible server.
        """
        if not self.model:
            answer = self._json("GET", "/v1/models", None)
            try:
                self.model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise MaxportError(
                    "the server lists no model", where=f"{self.url}/v1/models"
                ) from error
        return self.model

    def complete(
        self,
        prompt: str | list[int],
        max_tokens: int,
        *,
        logprobs: int = 0,
        to_the_end: bool = False,
    ) -> Completion:
        """Greedy continuation of a text or of token ids.

        Log probabilities are left out, now and later, once the server has refused them. With
        `to_the_end` MAX goes on to `max_tokens` where the model would have ended its text.

        Raises:
            MaxportError: The server refuses the request or does not answer in time.
        """
        body: dict[str, Any] = {
            "model": self.model_name(),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if to_the_end:
            body["ignore_eos"] = True
        if logprobs and self.gives_logprobs:
            try:
                return _completion(
                    self._json("POST", "/v1/completions", {**body, "logprobs": logprobs})
                )
            except MaxportError as error:
                if "logprob" not in error.what.lower():
                    raise
                self.gives_logprobs = False
        return _completion(self._json("POST", "/v1/completions", body))

    def chat(self, content: str, max_tokens: int) -> Completion:
        """Greedy answer to one user message, through the server's chat template.

        Raises:
            MaxportError: The server refuses the request or does not answer in time.
        """
        messages = [{"role": "user", "content": content}]
        body = {"model": self.model_name(), "messages": messages, "max_tokens": max_tokens}
        answer = self._json("POST", "/v1/chat/completions", {**body, "temperature": 0})
        choice = _first_choice(answer)
        text = (choice.get("message") or {}).get("content") or ""
        return Completion(text, _prompt_tokens(answer), finish=str(choice.get("finish_reason")))

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        where = f"{self.url}{path}"
        try:
            answer = self._http.request(method, where, json=body, timeout=self.timeout_s)
        except httpx.TimeoutException as error:
            raise MaxportError(
                f"the server did not answer within {self.timeout_s:.0f} s", where=where
            ) from error
        except httpx.HTTPError as error:
            raise MaxportError(
                f"no server answers: {error}",
                where=where,
                fix="start one with `maxport serve MODEL --port-dir DIR`",
            ) from error
        if answer.status_code >= 400:
            said = " ".join(answer.text.split())[:300]
            raise MaxportError(f"the server refuses ({answer.status_code}): {said}", where=where)
        try:
            return answer.json()
        except ValueError as error:
            raise MaxportError("the server's answer is not JSON", where=where) from error


def _first_choice(answer: Any) -> dict[str, Any]:
    try:
        return dict(answer["choices"][0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MaxportError(f"the server's answer has no choices: {str(answer)[:200]}") from error


def _prompt_tokens(answer: Any) -> int | None:
    usage = answer.get("usage") or {}
    count = usage.get("prompt_tokens")
    return int(count) if count is not None else None


def _completion(answer: Any) -> Completion:
    choice = _first_choice(answer)
    given = choice.get("logprobs") or {}
    return Completion(
        text=str(choice.get("text", "")),
        prompt_tokens=_prompt_tokens(answer),
        top=tuple(given.get("top_logprobs") or ()),
        chosen=tuple(float(value) for value in given.get("token_logprobs") or ()),
        finish=str(choice.get("finish_reason")),
    )
