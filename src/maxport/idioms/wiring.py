"""How a block is wired: residual additions, gates, multipliers, and the split into heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from maxport.idioms.base import Candidate, Recogniser
from maxport.ir import TOKENS, Node, Param, Ref

_SPLITS = {
    "chunk",
    "reshape",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "transpose",
    "permute",
}


def match(recogniser: Recogniser) -> None:
    """Recognise residuals, gates and multipliers by numbers; mark pure re-arrangements of heads."""
    for node in list(recogniser.graph.nodes):
        if node.proof or len(node.args) < 2:
            continue
        candidate = _binary(recogniser, node)
        if candidate is not None:
            recogniser.accept(candidate)
    _heads(recogniser)


def _binary(recogniser: Recogniser, node: Node) -> Candidate | None:
    a, b = node.args[0], node.args[1]
    if node.attrs:
        return None
    nodes = recogniser.graph.by_name()
    if isinstance(a, Ref) and isinstance(b, Ref) and not _is_hidden(nodes, a, b, node):
        return None
    if node.op == "add" and isinstance(a, Ref) and isinstance(b, Ref):
        return Candidate(node.name, "residual", [a, b], {}, lambda *v: v[0] + v[-1])
    if node.op == "mul" and isinstance(a, Ref) and isinstance(b, Ref):
        return Candidate(node.name, "gate", [a, b], {}, lambda *v: v[0] * v[-1])
    if node.op in ("mul", "div") and isinstance(a, Ref) and isinstance(b, int | float):
        factor = float(b) if node.op == "mul" else 1.0 / float(b)
        attrs: dict[str, Any] = {"by": b, "divide": node.op == "div"}
        return Candidate(node.name, "multiplier", [a], attrs, lambda x: x * factor)
    return None


def _is_hidden(nodes: dict[str, Node], a: Ref, b: Ref, node: Node) -> bool:
    """Whether both operands and the result are per-token vectors of one shape."""
    shapes = []
    for ref in (a, b):
        shape = nodes[ref.name].shape
        shapes.append(shape if ref.part is None else shape[ref.part])
    return shapes[0] == shapes[1] == node.shape and TOKENS in node.shape


def _heads(recogniser: Recogniser) -> None:
    """Mark the re-arrangements between a projection and an attention as part of it."""
    graph = recogniser.graph
    nodes, users = graph.by_name(), graph.users()
    ends = {"attend", "rope", "rms_norm", "layer_norm"}

    def mark(node: Node) -> None:
        if node.op in _SPLITS and not node.proof and _only_moves(recogniser, node):
            node.proof = "moves values only, float64, exact"

    for node in graph.nodes:
        if node.op not in ends:
            continue
        stack = [r.name for r in node.refs()]
        while stack:
            above = nodes[stack.pop()]
            if above.op in _SPLITS and not above.proof:
                mark(above)
                stack += [r.name for r in above.refs()]
        if node.op in ("attend", "rope"):
            below = users[node.name]
            while len(below) == 1 and below[0].op in _SPLITS and not below[0].proof:
                mark(below[0])
                below = users[below[0].name]


def _only_moves(recogniser: Recogniser, node: Node) -> bool:
    """Whether the result holds values of the input, each at most once."""
    source = node.args[0]
    if not isinstance(source, Ref) or isinstance(source, Param):
        return False
    array = recogniser.array(source)
    data = np.arange(array.size, dtype=np.float64).reshape(array.shape)
    feed = {source.name: data if source.part is None else {source.part: data}}
    parts = range(len(node.shape)) if isinstance(node.shape, list) else [None]
    out = np.concatenate(
        [np.asarray(recogniser.values.run(node.name, feed, part)).ravel() for part in parts]
    )
    return len(np.unique(out)) == len(out) and bool(np.isin(out, data).all())
