"""A Hub on localhost: the part of the protocol that huggingface_hub uses, and its failures.

Serves checkpoint folders as repositories: the model-info API, HEAD and ranged GET of
/REPO/resolve/REVISION/FILE. `faults` maps a (method, path part) to a queue of answers to give
before the true one; a fault that is not a queue is given for ever.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Answer = Callable[["Handler"], None]


class HubServer(ThreadingHTTPServer):
    """Start with `with HubServer(root) as hub:`; repositories are `root/OWNER/NAME`."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.faults: list[tuple[str, str, Answer, list[int]]] = []
        self.requests: list[tuple[str, str, str]] = []
        self.sent: dict[str, int] = {}
        self.ignore_ranges = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, method: str, part: str, answer: Answer, times: int = 1_000_000) -> None:
        """Answer requests of `method` whose path contains `part` with a fault, `times` times."""
        self.faults.append((method, part, answer, [times]))

    def count(self, method: str, part: str) -> int:
        return sum(m == method and part in path for m, path, _ in self.requests)

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer("GET")

    def do_HEAD(self) -> None:
        self.answer("HEAD")

    def answer(self, method: str) -> None:
        self.server.requests.append((method, self.path, self.headers.get("Range", "")))
        for on_method, part, fault, left in self.server.faults:
            if on_method in (method, "*") and part in self.path and left[0] > 0:
                left[0] -= 1
                fault(self)
                return
        self.true_answer()

    def true_answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        if path.startswith("/api/models/"):
            self.info(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            repo, _, rest = path.strip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            self.file(repo, revision, name)
        else:
            self.error(404)

    def error(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        headers = {"Content-Length": "0", **{k.replace("_", "-"): v for k, v in headers.items()}}
        if code:
            headers["X-Error-Code"] = code
        if message:
            headers["X-Error-Message"] = message
        self.reply(status, headers, b"")

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def info(self, rest: str) -> None:
        repo, _, revision = rest.partition("/revision/")
        folder = self.server.root / repo
        if not folder.is_dir():
            self.error(404, "RepoNotFound", "Repository not found")
        elif revision and revision not in ("main", "v1", COMMIT):
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            siblings = [
                {"rfilename": p.relative_to(folder).as_posix(), "size": p.stat().st_size}
                for p in files
            ]
            body = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}
            data = json.dumps(body).encode()
            kind = {"Content-Type": "application/json", "Content-Length": str(len(data))}
            self.reply(200, kind, data)

    def file(self, repo: str, revision: str, name: str) -> None:
        path = self.server.root / repo / name
        if not (self.server.root / repo).is_dir():
            return self.error(404, "RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self.error(404, "RevisionNotFound")
        if not path.is_file():
            return self.error(404, "EntryNotFound", X_Repo_Commit=COMMIT)
        status, headers, data = self.ranged(path)
        if self.command == "GET":
            self.server.sent[name] = self.server.sent.get(name, 0) + len(data)
        self.reply(status, headers, data)

    def ranged(self, path: Path) -> tuple[int, dict[str, str], bytes]:
        size = path.stat().st_size
        etag = hashlib.sha256(f"{path.name}{size}".encode()).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range", "")
        if not wanted.startswith("bytes=") or self.server.ignore_ranges:
            return 200, {**headers, "Content-Length": str(size)}, path.read_bytes()
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) if last else size - 1, size - 1)
        with path.open("rb") as stream:
            stream.seek(start)
            data = stream.read(end - start + 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{size}"
        return 206, {**headers, "Content-Length": str(len(data))}, data


def status(code: int, error: str = "", message: str = "", **headers: str) -> Answer:
    """An error answer."""
    return lambda handler: handler.error(code, error, message, **headers)


def slow(seconds: float) -> Answer:
    """Nothing for a while, then the connection ends."""

    def answer(handler: Handler) -> None:
        threading.Event().wait(seconds)  # not time.sleep, which tests make instant
        handler.close_connection = True

    return answer


def cut_off(after: int) -> Answer:
    """Promise the whole answer, send `after` bytes of it, hang up."""

    def answer(handler: Handler) -> None:
        repo, _, rest = urlparse(handler.path).path.strip("/").partition("/resolve/")
        code, headers, data = handler.ranged(handler.server.root / repo / rest.split("/", 1)[1])
        handler.reply(code, headers, data[:after])
        handler.wfile.flush()
        handler.close_connection = True
        handler.connection.close()

    return answer


def redirect_loop(handler: Handler) -> None:
    """Redirect to the same place."""
    handler.reply(302, {"Location": handler.path, "Content-Length": "0"}, b"")


def page(handler: Handler) -> None:
    """What a captive portal says: 200 and HTML."""
    body = b"<html>please log in</html>"
    headers = {"Content-Type": "text/html", "Content-Length": str(len(body))}
    handler.reply(200, headers, body)
