"""Formatting and checking emitted code with ruff."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ruff import find_ruff_bin

from maxport.emit.prose import WIDTH
from maxport.errors import MaxportError

#: Rules every emitted file passes: errors, imports, bugs, simplifications, docstrings of classes
RULES = "E,F,I,UP,B,SIM,D1"
IGNORED = "D102,D105,D107"


def format_folder(folder: Path, rules: str = RULES) -> None:
    """Sort the imports of every Python file in `folder`, format it, and check it by `rules`.

    Raises:
        MaxportError: If ruff finds a problem; it is a defect of the emitter.
    """
    common = ["--isolated", "--line-length", str(WIDTH), "--target-version", "py311"]
    _ruff(["check", "--quiet", "--fix", "--select", "I,UP", *common, "--exit-zero"], folder)
    _ruff(["format", "--quiet", "--isolated", "--line-length", str(WIDTH)], folder)
    _ruff(["check", "--quiet", "--select", rules, "--ignore", IGNORED, *common], folder)


def _ruff(arguments: list[str], folder: Path) -> None:
    # Not `sys.executable -m ruff`: MAX may set sys.executable to another interpreter.
    command = [find_ruff_bin(), *arguments, "--no-cache", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MaxportError(
            f"emitted code fails ruff {arguments[0]}",
            where=(done.stdout + done.stderr).strip(),
            fix="report this with the model's config.json: it is a defect of maxport",
        )
