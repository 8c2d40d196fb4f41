"""What PATH means: an installed architecture's name, a folder with a package, or one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from maxport.errors import MaxportError
from maxport.migrate.sources import ARCHITECTURES, Sources, max_folder


@dataclass
class Target:
    """A package or file to look at.

    Attributes:
        name: Folder or file stem, e.g. `llama3`.
        path: The folder, or the single file.
        package: Dotted package name its files are read under.
        files: Its Python files, sorted; without caches and hidden folders.
        sources: Parsed modules, shared by everything that looks at this target.
        installed: True when it lies in the installed MAX package.
    """

    name: str
    path: Path
    package: str
    files: list[Path]
    sources: Sources
    installed: bool

    @property
    def folder(self) -> Path:
        """The folder that holds the files."""
        return self.path if self.path.is_dir() else self.path.parent

    def module_name(self, file: Path) -> str:
        """Dotted module name of one of this target's files."""
        parts = list(file.relative_to(self.folder).with_suffix("").parts)
        if parts and parts[-1] == "__init__":
            parts.pop()
        return ".".join([self.package, *parts])


def installed_architectures() -> list[str]:
    """Names of the architecture packages of the installed MAX, sorted."""
    root = max_folder() / "pipelines" / "architectures"
    return sorted(p.name for p in root.iterdir() if p.is_dir() and any(p.rglob("*.py")))


def open_target(path: str, sources: Sources | None = None) -> Target:
    """Find what PATH names.

    Args:
        path: An installed architecture's name, a folder, or a Python file.
        sources: Parsed modules to reuse when PATH lies in the installed MAX.

    Raises:
        MaxportError: nothing by that name, an empty folder, or a file that is not Python.
    """
    place = Path(path).expanduser()
    if not place.exists():
        place = _installed(path)
    place = place.resolve()
    if place.is_file() and place.suffix != ".py":
        raise MaxportError(
            "not a Python file",
            where=str(place),
            fix="give a .py file, a folder or a name",
        )
    files = python_files(place)
    if not files:
        raise MaxportError(
            "no Python files here",
            where=str(place),
            fix="give the folder with the model's code",
        )
    folder = place if place.is_dir() else place.parent
    package, roots = _package_of(folder)
    installed = folder.is_relative_to(max_folder().resolve())
    name = place.name if place.is_dir() else place.stem
    parsed = sources if sources and not roots else Sources(roots)
    return Target(name, place, package, files, parsed, installed)


def _installed(name: str) -> Path:
    place = max_folder() / "pipelines" / "architectures" / name
    if name and "/" not in name and place.is_dir():
        return place
    import difflib

    near = difflib.get_close_matches(name, installed_architectures(), 3, 0.5)
    hint = f"; closest installed names: {', '.join(near)}" if near else ""
    raise MaxportError(
        f"no such file, folder or installed architecture{hint}",
        where=name,
        fix="give a path, or a folder name from `maxport list-archs`",
    )


def python_files(place: Path) -> list[Path]:
    """Python files of a folder, below it too, or the file itself."""
    if place.is_file():
        return [place]
    found = (p for p in place.rglob("*.py") if "__pycache__" not in p.parts)
    return sorted(p for p in found if not _hidden(p.relative_to(place)))


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _package_of(folder: Path) -> tuple[str, dict[str, Path]]:
    """Dotted name of `folder` and the roots to read it under.

    A folder that lies in no package is read as if it lay among MAX's architectures, so that
    `from ..llama3 import` in a copied architecture still finds its donor.
    """
    base = max_folder().resolve()
    if folder.is_relative_to(base):
        return ".".join(["max", *folder.relative_to(base).parts]), {}
    top = folder
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    if top == folder:
        name = f"{ARCHITECTURES}.{folder.name}"
        return name, {name: folder, folder.name: folder}
    return ".".join([top.name, *folder.relative_to(top).parts]), {top.name: top}
