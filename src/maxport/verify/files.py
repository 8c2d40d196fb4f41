"""Write the report's page whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from maxport.errors import MaxportError
from maxport.verify.report import Report


def check_page(path: Path, *, force: bool) -> None:
    """Refuse a page that cannot be written, before any work is done.

    Raises:
        MaxportError: The path is a folder, exists without `force`, or its folder is not there.
    """
    if path.is_dir():
        raise MaxportError("the page's path is a folder", where=str(path), fix="name a file")
    if path.exists() and not force:
        raise MaxportError("the page already exists", where=str(path), fix="pass --force")
    if not path.resolve().parent.is_dir():
        raise MaxportError("the page's folder does not exist", where=str(path.resolve().parent))
    if not os.access(path.resolve().parent, os.W_OK):
        raise MaxportError("the page's folder is not writable", where=str(path.resolve().parent))


def write_page(report: Report, path: Path) -> None:
    """Write the page beside its place, then move it there."""
    from maxport.verify.page import html_page

    handle, temp = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(html_page(report))
        Path(temp).chmod(0o644)
        Path(temp).replace(path)
    finally:
        Path(temp).unlink(missing_ok=True)
