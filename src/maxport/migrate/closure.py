"""Which V2 definitions a model needs, and which of them V3 already has.

Starting from the model's own code, names are followed through imports. The result says, per source
module, which classes and functions must be carried over, and which layer classes can be replaced by
their V3 equivalent at every place they are used. One place that passes the class itself around
(`linear_cls=Linear`, a subclass, a `functools.partial`) rules replacement out for the whole
package: both signatures cannot be served at once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from maxport.migrate import api
from maxport.migrate.kinds import DROPPED_METHODS, Kinds
from maxport.migrate.sources import Definition, ModuleSource, dotted_name


@dataclass
class Closure:
    """What the V3 package is made of.

    Attributes:
        carried: source module -> names to carry over from it.
        native: dotted V2 classes replaced by V3's own.
        bridged: dotted functions wrapped with `F.functional`.
        reasons: dotted class -> why it could not be replaced.
    """

    carried: dict[str, set[str]] = field(default_factory=dict)
    native: set[str] = field(default_factory=set)
    bridged: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Site:
    """One use of a layer class: where, and the call if it is constructed there."""

    source: ModuleSource
    node: ast.expr
    parent: ast.AST
    statement: ast.stmt | None
    annotation: bool


def close(
    kinds: Kinds,
    own: dict[str, set[str] | None],
    extra: Sequence[tuple[ModuleSource, ast.AST]] = (),
) -> Closure:
    """Compute the closure of a model's own code.

    Args:
        kinds: The judge of names.
        own: own module -> names of interest in it, None for the whole file.
        extra: further code to follow, such as how the pipeline model constructs the root.
    """
    candidates = set(api.PINS)
    reasons: dict[str, str] = {}
    while True:
        closure = Closure()
        sites: list[tuple[str, _Site]] = []
        _walk(kinds, own, extra, candidates, closure, sites)
        failed: dict[str, str] = {}
        for dotted, site in sites:
            reason = _why_not(kinds, dotted, site)
            if reason:
                failed.setdefault(dotted, f"{reason} ({site.source.name}:{site.node.lineno})")
        if not failed:
            closure.native = {dotted for dotted, _ in sites}
            closure.reasons = reasons
            return closure
        reasons |= failed
        candidates -= set(failed)


def _walk(
    kinds: Kinds,
    own: dict[str, set[str] | None],
    extra: Sequence[tuple[ModuleSource, ast.AST]],
    native: set[str],
    closure: Closure,
    sites: list[tuple[str, _Site]],
) -> None:
    queue: list[tuple[ModuleSource, ast.AST]] = list(extra)
    for module, names in own.items():
        source = kinds.sources.module(module)
        if source is None:
            continue
        nodes = source.tree.body if names is None else [definition(source, n) for n in names]
        queue += [(source, node) for node in nodes if node is not None]
    while queue:
        source, node = queue.pop()
        for name, site in uses(source, node, kinds.dropped):
            found = kinds.sources.resolve(source.name, name)
            if found.module in own and own[found.module] is None:
                continue
            if found.dotted in api.GONE:
                continue
            if found.dotted in native:
                sites.append((found.dotted, site))
                continue
            kind = kinds.of(found)
            same = found.module == source.name
            if kind == "bridge":
                closure.bridged.add(found.dotted)
            elif kind == "layer" or (same and _local_constant(kinds, source, found)):
                added = closure.carried.setdefault(found.module, set())
                if found.name not in added:
                    added.add(found.name)
                    owner = kinds.sources.module(found.module)
                    target = definition(owner, found.name) if owner else None
                    if owner is not None and target is not None:
                        queue.append((owner, target))
    closure.carried = {module: names for module, names in closure.carried.items() if names}


def definition(source: ModuleSource, name: str) -> ast.stmt | None:
    """Top-level statement that defines `name`."""
    return source.classes.get(name) or source.functions.get(name) or source.constants.get(name)


def _local_constant(kinds: Kinds, source: ModuleSource, found: Definition) -> bool:
    """A module-level value that the carried code reads: copied along, it costs nothing."""
    return found.name in source.constants and found.name not in source.imports


def uses(
    source: ModuleSource, root: ast.AST, dropped: frozenset[str] = DROPPED_METHODS
) -> Iterator[tuple[str, _Site]]:
    """Names used below `root` that are imported or defined at module level, with their place."""
    known = source.imports.keys() | source.classes.keys() | source.functions.keys()
    known |= source.constants.keys()
    stack: list[tuple[ast.AST, ast.AST, ast.stmt | None, bool]] = [(root, root, None, False)]
    while stack:
        node, parent, statement, annotation = stack.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.FunctionDef) and node.name in dropped and node is not root:
            continue
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.Name | ast.Attribute):
            name = dotted_name(node)
            if name and name.split(".")[0] in known:
                yield name, _Site(source, node, parent, statement, annotation)
                continue
        for key, value in ast.iter_fields(node):
            marked = annotation or key in ("annotation", "returns")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    stack.append((child, node, statement, marked))


def _why_not(kinds: Kinds, dotted: str, site: _Site) -> str:
    """Why a use of a layer class rules out its V3 equivalent; empty when it does not."""
    if site.annotation:
        return ""
    parent = site.parent
    if isinstance(parent, ast.Call) and parent.func is not site.node:
        return "" if dotted_name(parent.func) == "isinstance" else "passed as a value"
    if not isinstance(parent, ast.Call):
        return "subclassed" if isinstance(parent, ast.ClassDef) else "used as a value"
    if choose(kinds, dotted, parent) is None:
        return "called with options V3's class does not have"
    dtype = bound(kinds, dotted, parent).get("dtype")
    literal = dtype is not None and dotted_name(dtype).startswith("DType.")
    simple = isinstance(site.statement, ast.Assign) and site.statement.value is parent
    return "" if simple or not literal else "fixed dtype inside an expression"


def bound(kinds: Kinds, dotted: str, call: ast.Call) -> dict[str, ast.expr]:
    """Arguments of a V2 constructor call by parameter name; empty when they cannot be told."""
    module, _, name = dotted.rpartition(".")
    signature = api.signature_of(kinds.sources, Definition(module, name))
    if signature is None or any(isinstance(arg, ast.Starred) for arg in call.args):
        return {}
    if len(call.args) > len(signature.positional):
        return {}
    named = dict(zip(signature.positional, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None:
            return {}
        named[keyword.arg] = keyword.value
    return named


def choose(kinds: Kinds, dotted: str, call: ast.Call) -> api.Equivalent | None:
    """The V3 equivalent that this call can use, or None."""
    named = bound(kinds, dotted, call)
    if not named:
        return None
    for option in api.PINS[dotted]:
        if all(_agrees(named, key, texts) for key, texts in option.requires.items()) and not (
            named.keys() - api.AMBIENT - option.requires.keys() - _accepted(kinds, option)
        ):
            return option
    return None


def _agrees(named: dict[str, ast.expr], key: str, texts: tuple[str, ...]) -> bool:
    if key in named:
        return ast.unparse(named[key]) in texts
    # RMSNorm's V2 default (True) is not what V3's class does; other absent options agree.
    return key != "multiply_before_cast"


def _accepted(kinds: Kinds, option: api.Equivalent) -> set[str]:
    signature = api.signature_of(kinds.sources, kinds.sources.resolve(option.module, option.name))
    names = set(signature.names) if signature else set()
    return names | {old for old, new in option.renamed.items() if new in names}
