"""What a name used in V2 code is, and therefore how it reaches the V3 code.

A V2 layer with an equivalent is replaced; a V2 layer without one is carried over, that is, its
class source is copied through the same codemods; a kernel or another `max.nn` function over graph
values is bridged with `F.functional`; settings, enums and everything that holds no graph value stay
imports.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Literal

from maxport.migrate import api
from maxport.migrate.classify import BaseWalk, bases_of
from maxport.migrate.sources import (
    ARCHITECTURES,
    KERNELS,
    Definition,
    ModuleSource,
    Sources,
    dotted_name,
)

Kind = Literal["root", "container", "function", "layer", "bridge", "plain"]

VALUES = frozenset({"TensorValue", "BufferValue", "TensorValueLike", "Weight", "Value"})
# Methods of the V2 sharding and loading protocol; V3 has none of them.
DROPPED_METHODS = frozenset({"shard", "sharding_strategy"})


@dataclass
class Kinds:
    """Judges definitions; remembers its verdicts."""

    sources: Sources
    walk: BaseWalk = field(init=False)
    # Methods left out of the V3 layers.
    dropped: frozenset[str] = DROPPED_METHODS
    _memo: dict[Definition, Kind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.walk = BaseWalk(self.sources)

    def of(self, definition: Definition) -> Kind:
        """Kind of a definition; `plain` while it is being judged (circular code ends there)."""
        if definition not in self._memo:
            self._memo[definition] = "plain"
            self._memo[definition] = self._judge(definition)
        return self._memo[definition]

    def _judge(self, at: Definition) -> Kind:
        if at.dotted in api.MODULE_ROOTS:
            return "root"
        if at.dotted in api.CONTAINERS:
            return "container"
        if at.dotted in api.FUNCTIONS:
            return "function"
        if at.module == KERNELS:
            return "bridge"
        if at.module.startswith("max.") and not _layer_code(at.module):
            return "plain"
        source = self.sources.module(at.module)
        if source is None:
            return "plain"
        if at.name in source.classes:
            return self._judge_class(source, at)
        if at.name in source.functions:
            return self._judge_function(source, source.functions[at.name])
        return "plain"

    def _judge_class(self, source: ModuleSource, at: Definition) -> Kind:
        lane, _, role = self.walk.lane_of(at)
        node = source.classes[at.name]
        if lane == "v2" and role == "layer":
            return "layer"
        if role == "pipeline" or _is_settings(node, source):
            return "plain"
        bases = (self.of(base) for base in bases_of(self.sources, source, node))
        mixes = any(kind == "layer" for kind in bases)
        # A config that only builds a layer keeps its identity; one that handles values mixes in.
        return "layer" if mixes or self.tainted(source, node, values_only=True) else "plain"

    def _judge_function(self, source: ModuleSource, node: ast.FunctionDef) -> Kind:
        if not self.tainted(source, node):
            return "plain"
        if source.name.startswith("max.nn") and not _takes_callables(self, source, node):
            return "bridge"
        return "layer"

    def tainted(self, source: ModuleSource, node: ast.AST, *, values_only: bool = False) -> bool:
        """True when code handles graph values or, unless `values_only`, builds V2 layers."""
        for item in ast.walk(node):
            name = dotted_name(item) if isinstance(item, ast.Name | ast.Attribute) else ""
            if not name:
                continue
            head = name.split(".")[0]
            if head not in source.imports and head not in source.classes | source.functions:
                continue
            found = self.sources.resolve(source.name, name)
            if found.module.startswith("max.graph"):
                if found.module.startswith("max.graph.ops") or found.name in VALUES:
                    return True
            elif not values_only and self.of(found) in ("layer", "bridge", "container"):
                return True
        return False


def _layer_code(module: str) -> bool:
    """True for the parts of MAX that hold layers; cache and quantisation settings are shared."""
    if module.startswith(ARCHITECTURES):
        return True
    return module.startswith("max.nn") and not module.startswith(
        ("max.nn.kv_cache", "max.nn.quant_config", "max.nn.sampling")
    )


def _is_settings(node: ast.ClassDef, source: ModuleSource) -> bool:
    """Dataclasses of plain settings and enums keep their identity and stay imported."""
    bases = {dotted_name(base).split(".")[-1] for base in node.bases}
    return bool(bases & {"Enum", "IntEnum", "StrEnum", "NamedTuple", "TypedDict"})


def _takes_callables(kinds: Kinds, source: ModuleSource, node: ast.FunctionDef) -> bool:
    """True when a parameter is a layer or a function: it cannot be bridged, only carried over."""
    args = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
    for arg in args:
        for item in ast.walk(arg.annotation) if arg.annotation else ():
            name = dotted_name(item) if isinstance(item, ast.Name | ast.Attribute) else ""
            if name in ("Callable", "Layer", "Module"):
                return True
            if name and kinds.of(kinds.sources.resolve(source.name, name)) in ("layer", "root"):
                return True
    return False
