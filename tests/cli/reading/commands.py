"""Run a command as a user does and check its JSON against the committed schema."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.resources import files
from typing import Any, NamedTuple
from unittest.mock import patch

import jsonschema

from maxport.children import child_environment


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(*arguments: object) -> Done:
    """The command's entry point in this process: an exception that escapes it fails the test."""
    from maxport.cli import main

    out, err = io.StringIO(), io.StringIO()
    argv = ["maxport", *map(str, arguments)]
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    return Done(int(code or 0), out.getvalue(), err.getvalue())


def schema(name: str) -> dict[str, Any]:
    text = (files("maxport.cli") / "schemas" / f"{name}.json").read_text("utf-8")
    return json.loads(text)


def report(command: str, *arguments: object, code: int = 0) -> dict[str, Any]:
    """The command's JSON report, validated; checks the exit code."""
    done = run(command, *arguments, "--json")
    assert done.returncode == code, (done.stdout, done.stderr)
    body = json.loads(done.stdout)
    jsonschema.validate(body, schema(command))
    return body


def cpu_seconds(*arguments: object) -> float:
    """User and system time of one run: unlike wall time, not the fault of a busy machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "maxport", *map(str, arguments)]
    subprocess.run(command, capture_output=True, check=False, env=child_environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


PROBE = """
import sys
from maxport.cli import cli
try:
    cli.main(sys.argv[1:], standalone_mode=False)
finally:
    print([n for n in ("torch", "max", "transformers") if n in sys.modules], file=sys.stderr)
"""


def heavy_imports(*arguments: object) -> str:
    """Which of torch, max, transformers a command imported, as printed."""
    command = [sys.executable, "-c", PROBE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    return done.stderr.strip().splitlines()[-1]
