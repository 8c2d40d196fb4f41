"""`max serve` with a port: the command, waiting until it is healthy, and a first answer."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from maxport.children import child_environment
from maxport.errors import MaxportError
from maxport.serving.client import Completion, Server

POLL_S = 1.0
SUFFIX = "_ModuleV3"


def serve_command(
    model: str, port_dir: Path | None, port: int, extra: Sequence[str] = ()
) -> list[str]:
    """The `max serve` command for a port.

    Args:
        model: Checkpoint folder or Hub id.
        port_dir: The port; None serves MAX's own architecture.
        port: HTTP port.
        extra: More of `max serve`'s options.

    Raises:
        MaxportError: MAX's command is not installed, or the folder is no port.
    """
    command = [max_executable(), "serve", "--model", model, "--port", str(port)]
    if port_dir is not None:
        if not (port_dir / "__init__.py").is_file():
            raise MaxportError(
                "not a port directory: it has no __init__.py",
                where=str(port_dir),
                fix="pass the folder that holds arch.py, not the one above it",
            )
        # MAX splits the path at its last slash, so `.` and `..` have to be written out.
        named = port_dir if port_dir.name not in ("", "..") else port_dir.resolve()
        command += ["--custom-architectures", str(named)]
        if registered_name(port_dir).endswith(SUFFIX) and "--prefer-module-v3" not in extra:
            command.append("--prefer-module-v3")
    return [*command, *extra]


def max_executable() -> str:
    """The `max` command: `max` where the PATH leads to it, else its path beside this Python.

    Raises:
        MaxportError: It is not installed.
    """
    beside, known = Path(sys.executable).with_name("max"), shutil.which("max")
    if known and (not beside.is_file() or Path(known).samefile(beside)):
        return "max"
    if beside.is_file():
        return str(beside)
    raise MaxportError("the max command is not installed", fix='pip install "max[serve]"')


def registered_name(port_dir: Path) -> str:
    """The name the port's arch.py registers, read without importing it; empty if not found."""
    path = port_dir / "arch.py"
    if not path.is_file():
        return ""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("SupportedArchitecture"):
            for keyword in node.keywords:
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
    return ""


@contextmanager
def running(
    command: Sequence[str],
    server: Server,
    *,
    timeout_s: float,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[subprocess.Popen[bytes]]:
    """The server process, from when it is healthy; ended on leaving.

    Raises:
        MaxportError: The port is taken, the process ends before it is healthy (with the end of
            its log), or it is not healthy in time.
    """
    if server.healthy():
        raise MaxportError(
            "a server answers at this address already",
            where=server.url,
            fix="choose another --port",
        )
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            list(command), stdout=log, stderr=subprocess.STDOUT, env=child_environment()
        )
        try:
            _wait(process, server, timeout_s, say, lambda: _tail(log))
            yield process
        finally:
            _end(process)


def _wait(
    process: subprocess.Popen[bytes],
    server: Server,
    timeout_s: float,
    say: Callable[[str], None],
    tail: Callable[[], str],
) -> None:
    begun = time.monotonic()
    while not server.healthy():
        spent = time.monotonic() - begun
        if process.poll() is not None:
            raise MaxportError(
                f"max serve ended with code {process.returncode}: {tail()}",
                fix="run `maxport gates` on the port: it finds most faults without a compile",
                code=1,
            )
        if spent > timeout_s:
            raise MaxportError(
                f"the server is not healthy after {timeout_s:.0f} s: {tail()}",
                fix="compiling can take minutes the first time: raise --timeout",
                code=1,
            )
        say(f"compiling and loading, {spent:.0f} s")
        time.sleep(POLL_S)


def _tail(log: object, lines: int = 12) -> str:
    """The last lines of the log that say something."""
    log.seek(0)  # type: ignore[attr-defined]
    text: str = log.read().decode("utf-8", errors="replace")  # type: ignore[attr-defined]
    told = [line for line in text.splitlines() if line.strip() and "Logger]" not in line]
    return "\n".join(told[-lines:])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def first_answer(server: Server, prompt: str, max_tokens: int, *, chat: bool) -> Completion:
    """An answer through the chat template where the checkpoint has one, else a continuation."""
    return server.chat(prompt, max_tokens) if chat else server.complete(prompt, max_tokens)


def has_chat_template(folder: Path) -> bool:
    """Whether a checkpoint folder holds a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and '"chat_template"' in config.read_text("utf-8", errors="replace")
