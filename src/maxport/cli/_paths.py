"""How a command writes a path back to the user who gave one."""

from __future__ import annotations

from pathlib import Path


def as_given(path: Path, given: Path | None) -> str:
    """A path below the current folder, relative to it if `given` was relative or left out."""
    here = Path.cwd()
    if (given is None or not given.is_absolute()) and path.is_absolute():
        return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
    return str(path)
