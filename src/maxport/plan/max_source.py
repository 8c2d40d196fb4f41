"""The installed MAX package as source text: modules, imports and classes by `ast`, never imported.

Importing MAX takes seconds; the answers `inspect`, `list-archs` and `check-walls` need are written
in its files as literals, keyword arguments and attribute reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from maxport.errors import MaxportError

ARCHITECTURES = "max.pipelines.architectures"
"""The package that holds one subpackage per built-in architecture, its slug."""


@cache
def max_root() -> Path:
    """Folder of the installed `max` package.

    Raises:
        MaxportError: MAX is not installed.
    """
    spec = find_spec("max")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "pipelines" / "architectures").is_dir():
            return Path(place)
    raise MaxportError("MAX is not installed", fix='run "pip install max"')


def max_version() -> str:
    """Version of the installed MAX.

    Raises:
        MaxportError: MAX is not installed.
    """
    try:
        return version("max")
    except PackageNotFoundError as error:
        raise MaxportError("MAX is not installed", fix='run "pip install max"') from error


def require_max() -> None:
    """Refuse a MAX that ports are not written for, without importing it.

    Raises:
        MaxportError: MAX is not installed, or its version is outside 26.7.
    """
    found = max_version()
    if not found.startswith("26.7."):
        raise MaxportError(
            f"maxport works with MAX 26.7, and MAX {found} is installed",
            fix='run: pip install "max[serve]>=26.7,<26.8"',
        )


@dataclass(frozen=True)
class Found:
    """A definition and the module it stands in."""

    module: str
    node: ast.AST

    @property
    def place(self) -> str:
        """`path/inside/max.py:line`."""
        line = getattr(self.node, "lineno", 0)
        return f"{short_path(self.module)}:{line}"


def module_path(module: str) -> Path | None:
    """The file of a dotted module inside `max`; None if there is none."""
    parts = module.split(".")
    if parts[0] != "max":
        return None
    base = max_root().joinpath(*parts[1:])
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


def short_path(module: str) -> str:
    """A module's file below the architectures folder, or below `max`, for messages."""
    path = module_path(module)
    if path is None:
        return module
    architectures = max_root() / "pipelines" / "architectures"
    root = architectures if architectures in path.parents else max_root()
    return path.relative_to(root).as_posix()


@cache
def tree_of(module: str) -> ast.Module | None:
    """Parsed source of a module inside `max`; None if it has no source or does not parse."""
    path = module_path(module)
    if path is None:
        return None
    try:
        return ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def is_package(module: str) -> bool:
    """Whether a module is a folder with `__init__.py`."""
    path = module_path(module)
    return path is not None and path.name == "__init__.py"


@cache
def names_of(module: str) -> dict[str, ast.AST]:
    """Top-level definitions and imports of a module by the name they bind."""
    bound: dict[str, ast.AST] = {}
    tree = tree_of(module)
    for node in _top_level(tree.body) if tree else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    bound[target.id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            bound[node.target.id] = node.value
    return bound


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If):  # `if TYPE_CHECKING:` imports count too
            yield from _top_level(node.body)


def resolve(module: str, name: str, depth: int = 12) -> Found | None:
    """The class, function or value that `name` means in `module`, followed through imports.

    `name` may be dotted (`weight_adapters.convert`). None if it leaves `max` or is not found.
    """
    if depth == 0:
        return None
    first, _, rest = name.partition(".")
    node = names_of(module).get(first)
    if node is None:
        below = f"{module}.{first}"
        if module_path(below) is None:
            return None
        return resolve(below, rest, depth - 1) if rest else Found(below, ast.Module([], []))
    if isinstance(node, ast.Import | ast.ImportFrom):
        target = _imported(module, node, first)
        if target is None:
            return None
        where, what = target
        dotted = ".".join(part for part in (what, rest) if part)
        return resolve(where, dotted, depth - 1) if dotted else None
    if rest and isinstance(node, ast.ClassDef):
        return class_member(Found(module, node), rest)
    return Found(module, node) if not rest else None


def _imported(module: str, node: ast.Import | ast.ImportFrom, bound: str) -> tuple[str, str] | None:
    """(module, name inside it) that an import binds to `bound`; the name is "" for a module."""
    for alias in node.names:
        if (alias.asname or alias.name.split(".")[0]) != bound:
            continue
        if isinstance(node, ast.Import):
            return (alias.name if alias.asname else bound), ""
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            keep = len(parts) - node.level + (1 if is_package(module) else 0)
            base = ".".join(parts[:keep] + ([base] if base else []))
        return base, alias.name
    return None


def bases(found: Found) -> Iterator[Found]:
    """A class and all its base classes inside `max`, nearest first."""
    queue, seen = [found], set()
    while queue:
        current = queue.pop(0)
        if not isinstance(current.node, ast.ClassDef):
            continue
        key = (current.module, current.node.name)
        if key in seen:
            continue
        seen.add(key)
        yield current
        for base in current.node.bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            if above := resolve(current.module, ast.unparse(target)):
                queue.append(above)


def class_member(found: Found, name: str) -> Found | None:
    """A method or class-level value, looked up along the base classes."""
    for owner in bases(found):
        assert isinstance(owner.node, ast.ClassDef)
        for node in owner.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return Found(owner.module, node)
            value = _assigned(node, name)
            if value is not None:
                return Found(owner.module, value)
    return None


def _assigned(node: ast.stmt, name: str) -> ast.expr | None:
    """The value that a class-level statement assigns to `name`."""
    if isinstance(node, ast.AnnAssign):
        targets, value = [node.target], node.value
    elif isinstance(node, ast.Assign):
        targets, value = node.targets, node.value  # type: ignore[assignment]
    else:
        return None
    return value if any(isinstance(t, ast.Name) and t.id == name for t in targets) else None


def literal(found: Found | None) -> object:
    """The Python value of a literal expression; None if it is not one."""
    if found is None or not isinstance(found.node, ast.expr):
        return None
    try:
        return ast.literal_eval(found.node)
    except ValueError:
        return None
