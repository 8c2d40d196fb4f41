"""Formatting and checking emitted code with ruff."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from maxport.emit.prose import WIDTH
from maxport.errors import MaxportError

#: Rules every emitted file passes: errors, imports, bugs, simplifications, docstrings of classes
RULES = "E,F,I,UP,B,SIM,D1"
IGNORED = "D102,D105,D107"


def format_folder(folder: Path) -> None:
    """Sort the imports of every Python file in `folder`, format it, and check it.

    Raises:
        MaxportError: If ruff finds a problem; it is a defect of the emitter.
    """
    common = ["--isolated", "--line-length", str(WIDTH), "--target-version", "py311"]
    _ruff(["check", "--quiet", "--fix", "--select", "I,UP", *common, "--exit-zero"], folder)
    _ruff(["format", "--quiet", "--isolated", "--line-length", str(WIDTH)], folder)
    _ruff(["check", "--quiet", "--select", RULES, "--ignore", IGNORED, *common], folder)


def _ruff(arguments: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MaxportError(
            f"emitted code fails ruff {arguments[0]}",
            where=(done.stdout + done.stderr).strip(),
            fix="report this with the model's config.json: it is a defect of maxport",
        )
