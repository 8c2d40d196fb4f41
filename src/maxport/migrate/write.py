"""Put a migrated package on disk whole, or not at all."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from maxport.children import child_environment
from maxport.errors import MaxportError


def destination(original: Path, name: str, out: Path | None, *, force: bool) -> Path:
    """Where the package goes: beside the original, or below `out`.

    Raises:
        MaxportError: it exists already (without `force`), or the place cannot be written.
    """
    parent = out if out is not None else original.parent
    target = parent / name
    if target.exists() and not force:
        raise MaxportError(
            "the V3 package exists already",
            where=str(target),
            fix="choose another folder with -o, or pass --force to replace it",
        )
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise MaxportError(
            "something that is no folder stands where the V3 package goes",
            where=str(target),
            fix="move it away, or choose another folder with -o",
        )
    nearest = parent
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise MaxportError(
            "cannot write here", where=str(parent), fix="choose a writable folder with -o"
        )
    return target


def write_package(files: dict[str, str], target: Path) -> None:
    """Write into a temporary folder beside the target, tidy it, then move it in whole.

    Args:
        files: Path inside the package -> text.
        target: From `destination`; replaced if it exists.

    Raises:
        MaxportError: the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise MaxportError(f"cannot write here ({error.strerror})", where=str(target)) from error
    try:
        for shown, text in files.items():
            path = work / shown
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        work.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def tidy(files: dict[str, str], generated: Iterable[str] = ()) -> dict[str, str]:
    """Sort imports and drop names and locals the rewrites left unused; nothing else moves.

    Args:
        files: Path inside the package -> text.
        generated: Paths of files that are new as a whole; these are formatted as well, to MAX's
            line length.

    Returns:
        The same paths with tidied text.
    """
    with tempfile.TemporaryDirectory(prefix="maxport-") as folder:
        for shown, text in files.items():
            path = Path(folder) / shown
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        places = [str(Path(folder) / shown) for shown in sorted(generated)]
        _ruff("check", *_FIXES, folder)
        if places:
            _ruff("format", "--isolated", "--quiet", "--no-cache", "--line-length=80", *places)
        return {shown: _tidied((Path(folder) / shown).read_text("utf-8")) for shown in files}


def _idle(text: str) -> set[int]:
    """Lines that hold what is left of `n = len(devices)` when nothing reads n."""
    return {
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "len"
        and node.lineno == node.end_lineno
    }


def _tidied(text: str) -> str:
    idle = _idle(text) if "len(" in text else set()
    if not idle:
        return text
    lines = text.splitlines(keepends=True)
    shorter = "".join(line for at, line in enumerate(lines, 1) if at not in idle)
    try:
        ast.parse(shorter)
    except SyntaxError:  # it was all that a block held
        return text
    return shorter


_FIXES = (
    "--isolated", "--quiet", "--fix", "--select", "I001,F401,F811,F841", "--unsafe-fixes",
    "--exit-zero", "--config", 'lint.isort.known-third-party=["max"]', "--no-cache",
    "--per-file-ignores", "__init__.py:F401",
)  # fmt: skip


def _ruff(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    if done.returncode:
        raise MaxportError(
            f"ruff could not tidy the migrated package: {' '.join(done.stderr.split())[:300]}",
            fix="report it; nothing was written",
        )
