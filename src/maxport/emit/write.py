"""Writing a port directory: in whole or not at all."""

from __future__ import annotations

import importlib.util
import keyword
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from maxport.emit.format import RULES, format_folder
from maxport.errors import MaxportError


def write_port(
    output_dir: Path,
    slug: str,
    files: Mapping[str, str],
    force: bool = False,
    *,
    rules: str = RULES,
) -> Path:
    """Write, format and check a port's files as `output_dir/slug`.

    The files are written to a folder beside the target and moved there in one step, so that a
    failure or Ctrl-C leaves neither half a port nor the loss of an old one.

    Args:
        output_dir: Folder that holds ports; made if missing.
        slug: Name of the port's folder, a Python identifier.
        files: Text of each file by name.
        force: Whether an existing port may be replaced.
        rules: The ruff rules the code must pass.

    Returns:
        The port's folder.

    Raises:
        MaxportError: If the slug is no identifier, the output folder is a file or not writable, a
            port exists and `force` is not given, or the emitted code does not pass ruff.
    """
    target = target_folder(output_dir, slug, force=force)
    created = _make_parents(output_dir)
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{slug}-", dir=output_dir))
    except OSError as error:
        _remove_parents(created)
        raise _not_writable(output_dir, error) from error
    try:
        _fill(staging, files)
        format_folder(staging, rules)
        staging.chmod(0o777 & ~_umask())
        _move_in(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        _remove_parents(created)
        raise
    return target


def target_folder(output_dir: Path, slug: str, *, force: bool = False) -> Path:
    """Where the port goes, after every check that needs no writing.

    Commands call it before they start work, so that a long run does not fail at its end.

    Raises:
        MaxportError: As `write_port`, but for what only writing shows.
    """
    if not slug.isidentifier() or keyword.iskeyword(slug):
        raise MaxportError(
            f"{slug!r} cannot be the name of a port: MAX imports it as a Python package",
            fix="choose a slug of letters, digits and underscores, e.g. --slug my_model",
        )
    if taken := _installed_at(slug, output_dir):
        raise MaxportError(
            f"an installed package is called {slug!r}: MAX would import that one instead",
            where=taken,
            fix=f"choose another slug, e.g. --slug {slug}_port",
        )
    for folder in (output_dir, *output_dir.parents):
        if folder.exists() and not folder.is_dir():
            raise MaxportError(
                "the output path is a file, not a folder",
                where=str(folder),
                fix="choose another --output-dir",
            )
    nearest = next(
        folder for folder in (output_dir, *output_dir.absolute().parents) if folder.exists()
    )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _not_writable(output_dir, None)
    target = output_dir / slug
    if (target.exists() or target.is_symlink()) and not force:
        raise MaxportError(
            "the port's folder exists already",
            where=str(target),
            fix="choose another --output-dir or --slug, or replace it with --force",
        )
    if target.exists() and not target.is_dir():
        raise MaxportError("the port's folder is a file", where=str(target), fix="remove it")
    return target


def _installed_at(slug: str, output_dir: Path) -> str | None:
    """Where Python finds a package of that name already, other than the port itself."""
    found = importlib.util.find_spec(slug)
    if found is None or (found.origin is None and found.submodule_search_locations):
        return None  # a plain folder of that name does not hide a package
    places = [*(found.submodule_search_locations or ()), found.origin or "built in"]
    if (output_dir / slug).resolve() == Path(places[0]).resolve():
        return None
    return str(places[0])


def _fill(staging: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = (staging / name).resolve()
        if not path.is_relative_to(staging.resolve()):
            raise MaxportError(f"{name!r} is outside the port's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _move_in(staging: Path, target: Path) -> None:
    """Put the finished folder in place of what is there, which is only removed afterwards."""
    if not target.exists():
        staging.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    target.rename(old / target.name)
    try:
        staging.rename(target)
    except BaseException:
        (old / target.name).rename(target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _make_parents(folder: Path) -> list[Path]:
    """Make a folder and its parents; those that are new, outermost last."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_parents(new)
        raise _not_writable(folder, error) from error
    return new


def _remove_parents(created: list[Path]) -> None:
    for folder in created:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _not_writable(folder: Path, error: OSError | None) -> MaxportError:
    why = f": {error.strerror}" if error and error.strerror else ""
    return MaxportError(
        f"the output folder is not writable{why}",
        where=str(folder),
        fix="choose another --output-dir",
    )
