"""The environment for child processes."""

from __future__ import annotations

import os


def child_environment() -> dict[str, str]:
    """The environment this process was given, with what Python code changed in it since.

    Importing `max.pipelines` sets PYTHONPATH and PYTHONEXECUTABLE to the first `python3` on PATH,
    behind `os.environ`'s back (MAX 26.7). A child that inherits them does not find the packages of
    a virtual environment that is used without being activated.
    """
    return dict(os.environ)
