"""Config keys that a V2 architecture reads, with the values its own config class falls back to.

Published config.json files hold keys that transformers' config classes do not save, and MAX reads
them. Which ones, and a value for each, stands in the V2 code: the settings class that reads
`config.moe_layer_freq` declares `moe_layer_freq: int = 1`. Where a layer refuses the declared
value (`if topk_method != "noaux_tc": raise`), the one it asks for is taken.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from maxport.migrate.classify import bases_of
from maxport.migrate.plan import Plan
from maxport.migrate.sources import ARCHITECTURES, Definition, ModuleSource
from maxport.migrate.target import Target


def keys_read(plan: Plan) -> dict[str, Any]:
    """Keys read by the target's settings classes and their bases -> the value declared for them.

    Keys without a literal value, and those whose value is None, are left out.
    """
    found: dict[str, Any] = {}
    target = plan.target
    for source, node in _settings(target):
        declared = _declared(node)
        read = _read(node)
        for base_source, base in _bases(target, source, node):
            declared = {**_declared(base), **declared}
            read |= _read(base) if base_source.name.startswith(ARCHITECTURES) else set()
        found |= {key: value for key, value in declared.items() if key in read}
    for key, accepted in _accepted(plan).items():
        if isinstance(found.get(key), str) and found[key] not in accepted:
            found[key] = accepted[0]
    return found


def _accepted(plan: Plan) -> dict[str, list[str]]:
    """Name -> the texts that the graph's code accepts for it, where it raises for others."""
    found: dict[str, list[str]] = {}
    for module in plan.graph:
        source = plan.kinds.sources.module(module)
        for node in ast.walk(source.tree) if source else ():
            if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
                continue
            refuses = isinstance(node.body[0], ast.Raise)
            negated = isinstance(node.test.ops[0], ast.NotEq | ast.NotIn)
            texts = [
                item.value
                for item in ast.walk(node.test.comparators[0])
                if isinstance(item, ast.Constant) and isinstance(item.value, str)
            ]
            if refuses and negated and texts:
                found.setdefault(ast.unparse(node.test.left).split(".")[-1], texts)
    return found


def _settings(target: Target) -> Iterator[tuple[ModuleSource, ast.ClassDef]]:
    """Classes of the target that declare settings with values."""
    for path in target.files:
        source = target.sources.module(target.module_name(path))
        for node in source.classes.values() if source else ():
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and item.value]
            if source is not None and fields:
                yield source, node


def _bases(
    target: Target, source: ModuleSource, node: ast.ClassDef
) -> Iterator[tuple[ModuleSource, ast.ClassDef]]:
    """A class's bases, nearest first."""
    queue = bases_of(target.sources, source, node)
    seen: set[Definition] = set()
    while queue:
        at = queue.pop(0)
        owner = target.sources.module(at.module)
        found = owner.classes.get(at.name) if owner else None
        if at in seen or owner is None or found is None:
            continue
        seen.add(at)
        yield owner, found
        queue += bases_of(target.sources, owner, found)


def _declared(node: ast.ClassDef) -> dict[str, Any]:
    """Fields of a class with a literal value."""
    found = {}
    for item in node.body:
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        try:
            value = ast.literal_eval(item.value) if item.value is not None else None
        except ValueError:
            continue
        if value is not None:
            found[item.target.id] = value
    return found


def _read(node: ast.ClassDef) -> set[str]:
    """Attributes read from something else than the class itself, and names asked for as text."""
    found: set[str] = set()
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Load):
            if isinstance(item.value, ast.Name) and item.value.id not in ("self", "cls"):
                found.add(item.attr)
        elif isinstance(item, ast.Call):
            if ast.unparse(item.func) == "getattr" and len(item.args) == 3:
                continue  # it brings its own default
            texts = [a for a in item.args if isinstance(a, ast.Constant)]
            found |= {a.value for a in texts if isinstance(a.value, str)}
    return found
