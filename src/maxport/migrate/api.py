"""MAX's two layer APIs as data: constructor signatures, equivalents, and what differs in meaning.

Signatures come from the installed package's source by syntax tree, so that a new MAX release is
seen as it is. What a syntax tree cannot tell - defaults that flip, an option that selects another
class - is in `PINS`; these are facts about MAX's public layer classes, not about models.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache

from maxport.migrate.sources import Definition, Sources, installed_max

NN = "max.experimental.nn"

# Settings every V2 layer takes and V3 reads from the default dtype and device instead.
AMBIENT = frozenset({"dtype", "device", "devices", "quantization_encoding", "name"})


@dataclass(frozen=True)
class Signature:
    """Parameters of a constructor, `self` left out."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    defaults: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """All parameter names."""
        return frozenset(self.positional + self.keyword_only)


@dataclass(frozen=True)
class Equivalent:
    """A V2 layer class and the V3 class that does the same.

    Attributes:
        module, name: Where the V3 class is imported from.
        renamed: V2 parameter -> V3 parameter.
        pinned: V3 parameter -> source text to pass unless the call says otherwise, because V3's
            default differs from V2's behaviour.
        requires: V2 parameter -> source texts for which the classes agree; a call with another
            value has no equivalent.
        positional_first: True when V3 takes the first parameter by position.
    """

    module: str
    name: str
    renamed: dict[str, str] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=dict)
    requires: dict[str, tuple[str, ...]] = field(default_factory=dict)
    positional_first: bool = False


# Keyed by the V2 class's definition. Verified against 26.7: bias is False by default in V2 and True
# in V3; V2's LayerNorm always computes in float32, V3's only with keep_dtype=False; V2's RMSNorm
# multiplies before the cast by default, V3's never does.
PINS: dict[str, tuple[Equivalent, ...]] = {
    "max.nn.linear.Linear": (
        Equivalent(
            f"{NN}.linear",
            "Linear",
            renamed={"has_bias": "bias"},
            pinned={"bias": "False"},
            requires={"quant_config": ("None",), "clip_weight": ("None",)},
        ),
    ),
    "max.nn.embedding.Embedding": (
        Equivalent(
            f"{NN}.embedding", "Embedding", renamed={"hidden_dim": "dim"}, positional_first=True
        ),
    ),
    "max.nn.norm.layer_norm.LayerNorm": (
        Equivalent(
            f"{NN}.norm", "LayerNorm", renamed={"dims": "dim"}, pinned={"keep_dtype": "False"}
        ),
    ),
    "max.nn.norm.rms_norm.RMSNorm": (
        Equivalent(
            f"{NN}.norm",
            "RMSNorm",
            requires={"multiply_before_cast": ("False",), "weight_offset": ("0.0", "0")},
        ),
    ),
}

# Functions with a V3 namesake that takes and returns Tensors.
FUNCTIONS: dict[str, tuple[str, str]] = {
    "max.nn.activation.activation_function_from_name": (
        f"{NN}.common_layers.activation",
        "activation_function_from_name",
    ),
}

# V2 containers -> V3.
CONTAINERS = {
    "max.nn.layer.layer_list.LayerList": "ModuleList",
    "max.nn.sequential.Sequential": "ModuleList",
}

# V2 layers whose every use is rewritten away.
GONE = frozenset({"max.nn.comm.allreduce.Allreduce"})

MODULE_ROOTS = frozenset({"max.nn.layer.layer.Module", "max.nn.layer.layer.Layer"})


@cache
def functional_names() -> frozenset[str]:
    """Public names of `max.experimental.functional`, from its `__init__`'s syntax tree."""
    path = installed_max() / "experimental" / "functional" / "__init__.py"
    tree = ast.parse(path.read_text("utf-8"))
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in names if not name.startswith("_"))


@cache
def shipped_kernels() -> frozenset[str]:
    """Kernels that MAX itself wraps as `name = F.functional(_name, ...)` for V3 layers."""
    path = installed_max() / "experimental" / "nn" / "common_layers" / "functional_kernels.py"
    tree = ast.parse(path.read_text("utf-8"))
    found: set[str] = set()
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        call, target = node.value, node.targets[0]
        if ast.unparse(call.func) == "F.functional" and isinstance(target, ast.Name):
            wrapped = ast.unparse(call.args[0]) if call.args else ""
            if wrapped.lstrip("_") == target.id:
                found.add(target.id)
    return frozenset(found)


def signature_of(sources: Sources, definition: Definition) -> Signature | None:
    """Constructor signature of a class, from its own or the nearest base's `__init__`."""
    seen: set[Definition] = set()
    queue = [definition]
    while queue:
        current = queue.pop(0)
        if current in seen:
            continue
        seen.add(current)
        source = sources.module(current.module)
        node = source.classes.get(current.name) if source else None
        if source is None or node is None:
            continue
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return _signature(item)
        from maxport.migrate.classify import bases_of

        queue += bases_of(sources, source, node)
    return None


def _signature(node: ast.FunctionDef) -> Signature:
    positional = [arg.arg for arg in node.args.args][1:]
    keyword_only = [arg.arg for arg in node.args.kwonlyargs]
    count = len(node.args.defaults)
    defaults = set(positional[len(positional) - count :] if count else [])
    pairs = zip(keyword_only, node.args.kw_defaults, strict=True)
    defaults |= {name for name, default in pairs if default is not None}
    return Signature(tuple(positional), tuple(keyword_only), frozenset(defaults))
