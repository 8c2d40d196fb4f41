"""Element-wise activations and soft caps, recognised by their values, not by their spelling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from maxport.idioms.base import Candidate, Recogniser, relative_difference
from maxport.ir import Graph, Node, Param, Ref

_UNARY = {
    "abs", "add", "cast", "clamp", "div", "erf", "exp", "gelu", "mul", "neg", "pow", "reciprocal",
    "relu", "sigmoid", "silu", "softplus", "square", "sub", "tanh",
}  # fmt: skip
_ANCHORS = {"erf", "exp", "gelu", "relu", "sigmoid", "silu", "softplus", "tanh"}


def _erf(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = np.vectorize(math.erf)(x)
    return out


def _sigmoid(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = 1 / (1 + np.exp(-x))
    return out


#: Each activation of MAX or one line of it, in float64.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(x, 0),
}


def match(recogniser: Recogniser) -> None:
    """Recognise every activation and soft cap of the graph."""
    for anchor in list(recogniser.graph.nodes):
        nodes = recogniser.graph.by_name()
        if anchor.name in nodes and anchor.op in _ANCHORS and not anchor.proof:
            _match_at(recogniser, anchor)


def _match_at(recogniser: Recogniser, anchor: Node) -> None:
    """Try every unary element-wise piece around the anchor, the longest first."""
    graph = recogniser.graph
    nodes = graph.by_name()
    sources, finals = _upwards(graph, anchor), _downwards(graph, anchor)
    for final in reversed(finals):
        for source in reversed(sources):
            if not _is_unary(nodes, final, source):
                continue
            found = _name(recogniser, final, source)
            if found is None:
                continue
            kind, attrs, formula = found
            if recogniser.accept(Candidate(final.name, kind, [source], attrs, formula)):
                return


def _value_args(node: Node) -> list[Any]:
    return [a for a in node.args if isinstance(a, Ref | Param)]


def _upwards(graph: Graph, anchor: Node) -> list[Ref]:
    """Values that may be the activation's input, nearest first."""
    nodes = graph.by_name()
    found: list[Ref] = []
    frontier = [a for a in anchor.args if isinstance(a, Ref)]
    while frontier and len(found) < 10:
        ref = frontier.pop(0)
        if ref in found:
            continue
        found.append(ref)
        node = nodes[ref.name]
        if node.op in _UNARY and not node.proof:
            frontier += [a for a in node.args if isinstance(a, Ref)]
    return found


def _downwards(graph: Graph, anchor: Node) -> list[Node]:
    """Nodes that may be the activation's result, nearest first."""
    users = graph.users()
    found, node = [anchor], anchor
    while len(users[node.name]) == 1 and len(found) < 8:
        node = users[node.name][0]
        if node.op not in _UNARY or node.proof:
            break
        found.append(node)
    return found


def _is_unary(nodes: dict[str, Node], final: Node, source: Ref) -> bool:
    """Whether `final` depends on `source` alone, element by element."""
    if source.name == final.name or nodes[source.name].dtype != final.dtype:
        return False
    stack, seen = [final], set()
    while stack:
        node = stack.pop()
        if node.name in seen:
            continue
        seen.add(node.name)
        if node.op not in _UNARY or node.proof:
            return False
        for arg in _value_args(node):
            if arg == source:
                continue
            if isinstance(arg, Param):
                return False
            stack.append(nodes[arg.name])
    return True


def _name(recogniser: Recogniser, final: Node, source: Ref) -> Any:
    """(idiom, attributes, formula) that fits on a few hundred points, or None."""
    shape = recogniser.array(source).shape
    x = np.linspace(-6.0, 6.0, math.prod(shape)).reshape(shape)
    truth = recogniser.values.run(
        final.name, {source.name: x} if source.part is None else {source.name: {source.part: x}}
    )
    for kind, formula in ACTIVATIONS.items():
        if relative_difference(truth, formula(x)) < 1e-7:
            return "activation", {"kind": kind}, formula
    cap = _cap(recogniser, final, source)
    if cap is not None and relative_difference(truth, cap * np.tanh(x / cap)) < 1e-9:
        return "softcap", {"cap": cap}, lambda v: cap * np.tanh(v / cap)
    return None


def _cap(recogniser: Recogniser, final: Node, source: Ref) -> float | None:
    """The literal c of `c * tanh(x / c)`, read off the final multiplication."""
    if final.op != "mul":
        return None
    numbers = [a for a in final.args if isinstance(a, int | float)]
    return float(numbers[0]) if len(numbers) == 1 and numbers[0] > 0 else None
