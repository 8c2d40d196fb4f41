"""Which config.json keys a MAX architecture (or a port) reads, and as what: found in its source.

A read is an attribute, `getattr`, `.get`, subscript or `in` on a Hugging Face config: a parameter
annotated as one, a name such as `huggingface_config`, or a part of one (`text_config`). What it is
read as is the keyword or variable the value goes to.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from maxport.checkpoint.cache import write_whole
from maxport.plan.max_source import (
    ARCHITECTURES,
    Found,
    bases,
    max_root,
    module_path,
    resolve,
    short_path,
    tree_of,
)
from maxport.plan.native import archs_in, scan_cache

_HF_NAME = re.compile(r"(huggingface|hf)_(\w+_)?config|text_config")
_HF_TYPE = re.compile(r"\b(AutoConfig|PretrainedConfig|PreTrainedConfig)\b")
_METHODS = {"get", "to_dict", "get_text_config", "to_diff_dict", "update", "items", "keys", "pop"}
_DEPTH = 4


@dataclass(frozen=True)
class Read:
    """One place where a config key is read.

    `key` is the path in config.json ("rope_scaling.factor"); `into` the keyword or variable that
    receives it, "" if it is only tested; `place` is `file:line`.
    """

    key: str
    into: str
    place: str


Reads = dict[str, tuple[Read, ...]]


@cache
def reads_of_slug(slug: str) -> Reads:
    """Keys that the architecture in `slug` reads: its own files, base classes and helpers."""
    modules = list(_modules(ARCHITECTURES + "." + slug))
    units = [Found(module, tree) for module in modules if (tree := tree_of(module))]
    for arch in archs_in(slug):
        units += _outside_classes(slug, (arch.config_class, arch.model_class), set(modules))
    return _collect(units)


@cache
def reads_of_pipeline() -> Reads:
    """Keys that MAX's pipeline code reads for every model: max/pipelines outside architectures."""
    kept = scan_cache("pipeline_reads")
    if stored := _load(kept):
        return stored
    modules = [
        module
        for part in ("lib", "weights", "kv_cache", "modeling")
        for module in _modules(f"max.pipelines.{part}")
    ]
    mentioning = [m for m in modules if _mentions_config(m)]
    found = _collect([Found(m, tree) for m in mentioning if (tree := tree_of(m))])
    _store(kept, found)
    return found


def reads_of_port(folder: Path) -> Reads:
    """Keys that the Python files of a port directory read."""
    units = []
    for path in sorted(folder.rglob("*.py")):
        try:
            units.append((path.name, ast.parse(path.read_text("utf-8"))))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
    collector = _Collector()
    for name, tree in units:
        collector.file(name, tree)
    return collector.table()


def _mentions_config(module: str) -> bool:
    path = module_path(module)
    return path is not None and _HF_NAME.search(path.read_text("utf-8", "replace")) is not None


def _load(path: Path) -> Reads:
    try:
        rows = json.loads(path.read_text("utf-8"))
        return {key: tuple(Read(key, *row) for row in found) for key, found in rows.items()}
    except (OSError, ValueError, TypeError):
        return {}


def _store(path: Path, reads: Reads) -> None:
    rows = {key: [(r.into, r.place) for r in found] for key, found in reads.items()}
    write_whole(path, json.dumps(rows))


def _modules(package: str) -> Iterator[str]:
    folder = max_root().joinpath(*package.split(".")[1:])
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        yield ".".join((package, *parts))


def _outside_classes(slug: str, names: Iterable[str | None], covered: set[str]) -> Iterator[Found]:
    """The config and model classes of an architecture and their bases, where other slugs hold them.

    Granite, for one, registers llama3's config class as its own.
    """
    package = f"{ARCHITECTURES}.{slug}"
    for name in names:
        places = (f"{package}.arch", package, f"{package}.model_config", f"{package}.model")
        found = next((f for place in places if name and (f := resolve(place, name))), None)
        for owner in bases(found) if found else ():
            if owner.module not in covered and owner.module.startswith(ARCHITECTURES):
                yield owner


def _collect(units: Iterable[Found]) -> Reads:
    collector = _Collector()
    for unit in units:
        collector.unit(unit)
    return collector.table()


@dataclass
class _Scope:
    """What the names of one function mean: Hugging Face configs and values read from them."""

    module: str | None
    file: str
    into: str = ""
    configs: dict[str, str] = field(default_factory=dict)  # name -> key prefix
    values: dict[str, str] = field(default_factory=dict)  # name -> key it holds


class _Collector:
    def __init__(self) -> None:
        self._reads: dict[str, dict[tuple[str, str], Read]] = {}
        self._followed: set[tuple[int, str]] = set()

    def table(self) -> Reads:
        return {key: tuple(found.values()) for key, found in sorted(self._reads.items())}

    def unit(self, found: Found) -> None:
        scope = _Scope(found.module, short_path(found.module))
        for function in _functions(found.node):
            self._function(function, scope, {}, _DEPTH)

    def file(self, name: str, tree: ast.Module) -> None:
        for function in _functions(tree):
            self._function(function, _Scope(None, name), {}, _DEPTH)

    def _function(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        outer: _Scope,
        given: dict[str, str],
        depth: int,
    ) -> None:
        scope = _Scope(outer.module, outer.file, outer.into)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            if _HF_NAME.fullmatch(argument.arg) or _HF_TYPE.search(kind):
                quantization = "quant" in argument.arg
                scope.configs[argument.arg] = "quantization_config." if quantization else ""
        scope.configs |= given
        self._assignments(node, scope)
        for child in node.body:
            self._walk(child, scope, scope.into, depth)

    def _assignments(self, node: ast.AST, scope: _Scope) -> None:
        """Names bound to a config, a part of one, or a value read from one."""
        for part in ast.walk(node):
            if isinstance(part, ast.Assign) and len(part.targets) == 1:
                target, value = part.targets[0], part.value
            elif isinstance(part, ast.AnnAssign | ast.NamedExpr) and part.value is not None:
                target, value = part.target, part.value
            else:
                continue
            if not isinstance(target, ast.Name):
                continue
            prefix = self._prefix(value, scope)
            key = self._key(value, scope)
            if prefix is not None:
                scope.configs[target.id] = prefix
            elif key is not None and _HF_NAME.fullmatch(target.id):
                scope.configs[target.id] = key + "."
            elif key is not None:
                scope.values[target.id] = key

    def _prefix(self, node: ast.expr, scope: _Scope) -> str | None:
        """Key prefix if the expression is a whole config; None otherwise."""
        if isinstance(node, ast.Name):
            if node.id in scope.configs:
                return scope.configs[node.id]
            return "" if re.fullmatch(r"(huggingface|hf)_config", node.id) else None
        if isinstance(node, ast.Attribute):
            if node.attr in ("huggingface_config", "hf_config"):
                return ""
            above = self._prefix(node.value, scope)
            part = node.attr.endswith("text_config") and above is not None
            return f"{above}{node.attr}." if part else None
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_text_config"):
            return ""
        return None

    def _key(self, node: ast.expr, scope: _Scope) -> str | None:
        """The key path an expression reads, or None."""
        if isinstance(node, ast.Attribute):
            prefix = self._prefix(node.value, scope)
            return None if prefix is None or node.attr in _METHODS else prefix + node.attr
        if isinstance(node, ast.Call):
            return self._call_key(node, scope)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self._inside(node.value, node.slice.value, scope)
        if isinstance(node, ast.BoolOp):
            return next((k for v in node.values if (k := self._key(v, scope))), None)
        return None

    def _call_key(self, node: ast.Call, scope: _Scope) -> str | None:
        name = ast.unparse(node.func)
        args = node.args
        if name in ("getattr", "hasattr") and len(args) > 1 and isinstance(args[1], ast.Constant):
            return self._inside(args[0], args[1].value, scope)
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and args
            and isinstance(args[0], ast.Constant)
        ):
            return self._inside(node.func.value, args[0].value, scope)
        return None

    def _inside(self, container: ast.expr, item: object, scope: _Scope) -> str | None:
        """Key path of one item of a config or of a nested value read from it."""
        if not isinstance(item, str):
            return None
        prefix = self._prefix(container, scope)
        if prefix is not None:
            return prefix + item
        if isinstance(container, ast.Name) and container.id in scope.values:
            return f"{scope.values[container.id]}.{item}"
        key = self._key(container, scope)
        return f"{key}.{item}" if key else None

    def _walk(self, node: ast.AST, scope: _Scope, into: str, depth: int) -> None:
        if isinstance(node, ast.expr):
            key = self._key(node, scope)
            if key is None and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                key = scope.values.get(node.id)
            if key:
                self._add(key, into, f"{scope.file}:{getattr(node, 'lineno', 0)}")
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            container = node.comparators[0]
            if isinstance(node.ops[0], ast.In | ast.NotIn) and (
                key := self._inside(container, node.left.value, scope)
            ):
                self._add(key, into, f"{scope.file}:{node.lineno}")
        if isinstance(node, ast.Call):
            self._follow(node, scope, into, depth)
        for child, name in _children(node, into):
            self._walk(child, scope, name, depth)

    def _add(self, key: str, into: str, place: str) -> None:
        self._reads.setdefault(key, {}).setdefault((into, place), Read(key, into, place))

    def _follow(self, call: ast.Call, scope: _Scope, into: str, depth: int) -> None:
        """Look into a helper function that is given a config."""
        passed = [(index, self._prefix(arg, scope)) for index, arg in enumerate(call.args)]
        named = {k.arg: self._prefix(k.value, scope) for k in call.keywords if k.arg}
        if depth == 0 or scope.module is None:
            return
        if all(p is None for _, p in passed) and all(p is None for p in named.values()):
            return
        found = resolve(scope.module, ast.unparse(call.func))
        if found is None or not isinstance(found.node, ast.FunctionDef):
            return
        if (id(found.node), into) in self._followed or module_path(found.module) is None:
            return
        self._followed.add((id(found.node), into))
        names = [a.arg for a in [*found.node.args.posonlyargs, *found.node.args.args]]
        skip = 1 if names[:1] in (["self"], ["cls"]) else 0
        given = {names[i + skip]: p for i, p in passed if p is not None and i + skip < len(names)}
        given |= {name: p for name, p in named.items() if p is not None and name}
        inner = _Scope(found.module, short_path(found.module), into)
        self._function(found.node, inner, given, depth - 1)


def _children(node: ast.AST, into: str) -> Iterator[tuple[ast.AST, str]]:
    """Child nodes with the name their value goes to."""
    if isinstance(node, ast.keyword):
        yield node.value, node.arg or into
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        name = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
        yield node.value, name if name.isidentifier() else into
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        for child in ast.iter_child_nodes(node):
            yield child, "" if child is node.test and not isinstance(node, ast.IfExp) else into
    else:
        for child in ast.iter_child_nodes(node):
            yield child, into


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods of a module or class, not the ones nested inside them."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef | ast.If | ast.Try):
            yield from _functions(child)
