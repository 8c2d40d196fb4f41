"""The user's cache folder and the one way files get into it: built beside, then moved in whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxport.errors import MaxportError


def cache_root() -> Path:
    """Folder for everything maxport keeps between runs (not created by this call).

    `$MAXPORT_CACHE` if set, else `$XDG_CACHE_HOME/maxport`, else `~/.cache/maxport`.
    """
    if own := os.environ.get("MAXPORT_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "maxport"


@contextmanager
def folder_moved_in_whole(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; on success it becomes `target`, on any error it goes.

    If another process finished the same target first, its result is kept and ours is dropped: the
    content of a cache entry is a function of its name.

    Raises:
        MaxportError: The parent folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise MaxportError(
            "the cache folder cannot be written",
            where=f"{target.parent}: {error.strerror}",
            fix="set MAXPORT_CACHE to a folder you can write",
        ) from error
    try:
        yield work
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_whole(target: Path, text: str) -> None:
    """Write a cache file so that readers see the old file, the new one, or none, never a part.

    A cache that cannot be written is not an error: the caller has its result already.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(target)
    except OSError:
        Path(name).unlink(missing_ok=True)
