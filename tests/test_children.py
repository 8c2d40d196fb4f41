"""Child processes are given the environment that this process was given."""

from __future__ import annotations

import os
import subprocess
import sys

from maxport.children import child_environment


def test_what_c_code_sets_does_not_reach_children() -> None:
    """As MAX's import does: PYTHONPATH set with `setenv`, which `os.environ` does not see."""
    code = (
        "import ctypes, subprocess, sys; from maxport.children import child_environment\n"
        "ctypes.CDLL(None).setenv(b'PYTHONPATH', b'/elsewhere', 1)\n"
        "child = [sys.executable, '-c', 'import sys; print(\"/elsewhere\" in sys.path)']\n"
        "print(subprocess.check_output(child, text=True).strip())\n"
        "print(subprocess.check_output(child, text=True, env=child_environment()).strip())\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_what_python_code_sets_reaches_children(monkeypatch) -> None:
    monkeypatch.setenv("MAXPORT_CACHE", "/somewhere")
    assert child_environment()["MAXPORT_CACHE"] == "/somewhere"
    assert child_environment() is not os.environ
