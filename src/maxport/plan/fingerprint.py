"""What a decoder computes, as comparable parts: measured from its traced and recognised graph.

A fingerprint has one `Kind` for each kind of layer and one for what surrounds the layers. Names of
modules and classes play no part in it (they are kept only to say where something was found), and
neither do sizes: two models with equal fingerprints differ in weights, sizes and names only.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from maxport.ir import Graph, Node
from maxport.plan.slots import Token, layer_slots, outer_slots
from maxport.plan.source import relative_to_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from maxport.idioms import Values

#: Raise it when what a fingerprint holds changes; stored fingerprints of other versions are void.
SCHEMA = 2
_INDEX = re.compile(r"^(.*?)\.?(\d+)(?=\.|$)")

Slots = dict[str, tuple[Token, ...]]
_MEASURED: dict[str, Fingerprint] = {}


@dataclass(frozen=True)
class Kind:
    """One kind of layer (or the surroundings): its slots, and how many layers of it were traced."""

    name: str
    slots: Slots
    layers: int = 1


@dataclass(frozen=True)
class Fingerprint:
    """A model's measured structure.

    Attributes:
        model: The Hugging Face class that was traced.
        kinds: Kinds of layers in order of first appearance.
        outer: Embedding, final norm, head.
        weights: Parameter names with layer numbers as `*`.
        file: The source file of that class, below transformers' folder where it lies there.
    """

    model: str
    kinds: tuple[Kind, ...]
    outer: Kind
    weights: tuple[str, ...]
    file: str = ""


def fingerprint(config: PreTrainedConfig) -> Fingerprint:
    """Trace a twin of `config` and read its fingerprint off the recognised graph.

    Args:
        config: A real or default config; only a twin of it (of a multimodal one's decoder) is
            built.

    Raises:
        MaxportError: If no twin runs, or it cannot be traced.
    """
    from maxport.trace.study import trace_twin
    from maxport.twin import decoder_config, twin_config

    source = getattr(config, "_name_or_path", "")
    key = f"{type(config).__qualname__} {source} {config.to_json_string()}"
    if key in _MEASURED:
        return _MEASURED[key]
    graph, values, model = trace_twin(twin_config(decoder_config(config)))
    _recognise(graph, values)
    names = sorted({re.sub(r"\d+", "*", n) for n, _ in model.named_parameters()})
    found = read_graph(graph, type(model).__name__, names)
    file = relative_to_transformers(inspect.getsourcefile(type(model)) or "")
    _MEASURED[key] = replace(found, file=file)
    return _MEASURED[key]


def _recognise(graph: Graph, values: Values) -> None:
    """Recognise idioms in place; what a pass cannot evaluate stays a plain operation.

    Scans over time have lengths that no proof can choose; they count as what they are made of.
    """
    from maxport.idioms import PASSES
    from maxport.idioms.base import Recogniser

    recogniser = Recogniser(graph, values)
    # Copied, because recognising changes nodes in place.
    traced = [(n.name, n.op, n.dtype, [ref.name for ref in n.refs()]) for n in graph.nodes]
    for idiom in PASSES:
        with contextlib.suppress(ValueError, IndexError):
            idiom.match(recogniser)
    graph.sweep()
    ropes = [node for node in graph.nodes if node.op == "rope"]
    several = len({node.attrs["rotation"].freqs for node in ropes}) > 1
    for node in ropes:
        node.attrs["several"] = several
        node.attrs["float32"] = _in_float32(traced, node.args[0].name, node.name)


def _in_float32(traced: Sequence[tuple[str, str, str, list[str]]], start: str, end: str) -> bool:
    """Whether a product on the way from one value to another is taken in float32.

    `traced` holds name, operation, dtype and operands of every node in order of computation.
    """
    below, exact = {start}, set[str]()
    for name, op, dtype, operands in traced:
        if name == start or below.isdisjoint(operands):
            continue
        below.add(name)
        if not exact.isdisjoint(operands) or (op == "mul" and dtype == "float32"):
            exact.add(name)
    return end in exact


def read_graph(graph: Graph, model: str, weights: Iterable[str]) -> Fingerprint:
    """The fingerprint of an already recognised graph.

    Args:
        graph: The traced model after `maxport.idioms.recognise`.
        model: The traced class's name.
        weights: Names of its parameters, numbers as `*`.
    """
    layers = _layers(graph.nodes)
    inside = {node.name for nodes in layers.values() for node in nodes}
    kinds: list[Kind] = []
    for nodes in layers.values():
        slots = layer_slots(nodes, graph)
        same = next((i for i, kind in enumerate(kinds) if kind.slots == slots), None)
        if same is None:
            kinds.append(Kind(f"layer kind {len(kinds) + 1}", slots))
        else:
            kind = kinds[same]
            kinds[same] = Kind(kind.name, kind.slots, kind.layers + 1)
    outer = Kind("outside the layers", outer_slots(graph, inside))
    return Fingerprint(model, tuple(kinds), outer, tuple(weights))


def _layers(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """Nodes by layer. Layers are the longest family of modules numbered at one place."""
    families: dict[str, dict[int, list[Node]]] = {}
    for node in nodes:
        if match := _INDEX.match(node.scope):
            family = families.setdefault(match[1], {})
            family.setdefault(int(match[2]), []).append(node)
    if not families:
        return {}
    prefix = max(families, key=lambda p: sum(len(group) for group in families[p].values()))
    return {f"{prefix}.{index}": group for index, group in sorted(families[prefix].items())}


def to_json(found: Fingerprint) -> dict[str, Any]:
    """Plain data that `from_json` turns back into an equal fingerprint."""
    return asdict(found)


def from_json(data: Mapping[str, Any]) -> Fingerprint:
    """A fingerprint from `to_json`'s data.

    Raises:
        KeyError, TypeError: If the data is of another schema.
    """

    def kind(row: Mapping[str, Any]) -> Kind:
        slots = {
            name: tuple(
                Token(t["op"], tuple((k, v) for k, v in t["attrs"]), t["place"]) for t in tokens
            )
            for name, tokens in row["slots"].items()
        }
        return Kind(row["name"], slots, row["layers"])

    kinds = tuple(kind(row) for row in data["kinds"])
    outer, weights = kind(data["outer"]), tuple(data["weights"])
    return Fingerprint(data["model"], kinds, outer, weights, data["file"])
