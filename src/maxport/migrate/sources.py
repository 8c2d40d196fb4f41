"""Python sources read without importing them: modules, classes, and what a name resolves to.

`Sources` finds a module's file below the installed `max` package or a folder handed in, parses it
once, and follows names through `from X import Y` chains and package `__init__` re-exports to the
place where they are defined. Neither `max` nor `torch` is imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from maxport.errors import MaxportError

ARCHITECTURES = "max.pipelines.architectures"
# MAX's kernel bindings: names in here are defined here, 14,000 lines that need no reading.
KERNELS = "max.nn.kernels"


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: dotted module and the name inside it.

    `name` is empty when the definition is the module itself.
    """

    module: str
    name: str

    @property
    def dotted(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass
class ModuleSource:
    """One parsed file: its syntax tree, imports, classes and functions by name."""

    name: str
    path: Path
    text: str
    tree: ast.Module
    is_package: bool
    imports: dict[str, Definition] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    constants: dict[str, ast.stmt] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """The package that relative imports in this module start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]


_elsewhere: list[Path] = []


def max_folder() -> Path:
    """Folder of the `max` package whose V2 code is read: the installed one, or `reading_max`'s."""
    return _elsewhere[-1] if _elsewhere else installed_max()


@contextmanager
def reading_max(folder: Path) -> Iterator[None]:
    """Read V2 code from another MAX release's `max` folder; what V3 offers stays the installed."""
    _elsewhere.append(folder)
    try:
        yield
    finally:
        _elsewhere.pop()


@cache
def installed_max() -> Path:
    """Folder of the installed `max` package, found without importing it.

    Raises:
        MaxportError: MAX is not installed in this environment.
    """
    spec = importlib.util.find_spec("max")
    locations = list(spec.submodule_search_locations or []) if spec else []
    for location in locations:
        folder = Path(location)
        if (folder / "pipelines" / "architectures").is_dir():
            return folder
    raise MaxportError(
        "MAX's Python package is not installed here",
        fix="install it with `pip install max`, then run the command again",
    )


def read_source(path: Path) -> str:
    """Text of a Python file.

    Raises:
        MaxportError: the file is missing, unreadable or not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MaxportError(
            "a source file is not UTF-8 text",
            where=f"{path}, byte {error.start}",
            fix="save the file as UTF-8",
        ) from error
    except OSError as error:
        raise MaxportError(
            f"cannot read a source file ({error.strerror})", where=str(path)
        ) from error


def parse_source(text: str, path: Path) -> ast.Module:
    """Syntax tree of `text`.

    Raises:
        MaxportError: the text is not valid Python; names file and line.
    """
    try:
        return ast.parse(text, str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise MaxportError(
            f"not valid Python: {getattr(error, 'msg', error)}",
            where=f"{path}:{line}" if line else str(path),
            fix="correct the syntax error first; nothing was written",
        ) from error


def _relative(package: str, level: int, module: str | None) -> str:
    parts = package.split(".")
    base = parts[: len(parts) - (level - 1)] if level > 1 else parts
    return ".".join([*base, module] if module else base)


def absolute_import(source: ModuleSource, node: ast.ImportFrom) -> str:
    """Dotted module that a (possibly relative) `from X import` names."""
    if not node.level:
        return node.module or ""
    return _relative(source.package, node.level, node.module)


def _collect(source: ModuleSource) -> None:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            module = absolute_import(source, node)
            for alias in node.names:
                source.imports[alias.asname or alias.name] = Definition(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                target = alias.name if alias.asname else bound
                source.imports[bound] = Definition(target, "")
    for node in source.tree.body:
        _collect_top(source, node)


def _collect_top(source: ModuleSource, node: ast.stmt) -> None:
    if isinstance(node, ast.ClassDef):
        source.classes[node.name] = node
    elif isinstance(node, ast.FunctionDef):
        source.functions[node.name] = node
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                source.constants[target.id] = node
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        source.constants[node.target.id] = node
    elif isinstance(node, ast.If | ast.Try):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                _collect_top(source, child)


class Sources:
    """Parsed modules by dotted name, read on demand.

    Args:
        roots: folders that stand for a package name, e.g. `{"mymodel": Path("models/mymodel")}`;
            everything else is looked up below the installed `max`.
    """

    def __init__(self, roots: dict[str, Path] | None = None) -> None:
        self.roots = dict(roots or {})
        self._modules: dict[str, ModuleSource | None] = {}

    def file_of(self, name: str) -> Path | None:
        """File of a dotted module name, or None when it is not ours to read."""
        for root, folder in self.roots.items():
            if name == root or name.startswith(root + "."):
                return _file_below(folder, name[len(root) :].strip(".").split("."))
        if name != "max" and not name.startswith("max."):
            return None
        modern = name.startswith("max.experimental")  # what the rewritten code is written for
        return _file_below(installed_max() if modern else max_folder(), name.split(".")[1:])

    def module(self, name: str) -> ModuleSource | None:
        """The parsed module, or None when no file answers to the name."""
        if name not in self._modules:
            path = self.file_of(name)
            self._modules[name] = self.load(name, path) if path else None
        return self._modules[name]

    def load(self, name: str, path: Path) -> ModuleSource:
        """Parse `path` as module `name` and remember it."""
        text = read_source(path)
        tree = parse_source(text, path)
        source = ModuleSource(name, path, text, tree, path.name == "__init__.py")
        _collect(source)
        self._modules[name] = source
        return source

    def resolve(self, module: str, name: str) -> Definition:
        """Follow `name`, as seen in `module`, to its definition.

        `name` may be dotted (`linear.Linear`). What leaves the readable sources, or runs in a
        circle of imports, resolves to the last place reached.
        """
        seen: set[tuple[str, str]] = set()
        current = Definition(module, name)
        while (current.module, current.name) not in seen:
            seen.add((current.module, current.name))
            step = self._step(current)
            if step is None:
                return current
            current = step
        return current

    def _step(self, at: Definition) -> Definition | None:
        if at.module == KERNELS or not at.name:
            return None
        source = self.module(at.module)
        if source is None:
            return None
        head, _, rest = at.name.partition(".")
        if head in source.classes or head in source.functions:
            return None
        if head in source.imports:
            target = source.imports[head]
            submodule = f"{target.module}.{target.name}" if target.name else target.module
            leaf = target.module == KERNELS
            owner = self.module(target.module) if target.name and not leaf else None
            defines = leaf or (owner is not None and _defines(owner, target.name))
            if rest and not defines and self.file_of(submodule):
                return Definition(submodule, rest)
            if not target.name:
                return Definition(target.module, rest)
            if not rest and not defines and self.file_of(submodule):
                return Definition(submodule, "")
            return Definition(target.module, target.name + (f".{rest}" if rest else ""))
        if rest and self.file_of(f"{at.module}.{head}"):
            return Definition(f"{at.module}.{head}", rest)
        return None


def _defines(source: ModuleSource, name: str) -> bool:
    return name in source.classes or name in source.functions or name in source.imports


def _file_below(folder: Path, parts: list[str]) -> Path | None:
    target = folder.joinpath(*[part for part in parts if part])
    if target.with_suffix(".py").is_file() and target != folder:
        return target.with_suffix(".py")
    init = target / "__init__.py"
    return init if init.is_file() else None


def dotted_name(node: ast.expr) -> str:
    """`a.b.C` of a name, attribute or subscripted base class; empty when it is something else."""
    if isinstance(node, ast.Subscript):
        return dotted_name(node.value)
    if isinstance(node, ast.Attribute):
        head = dotted_name(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""
