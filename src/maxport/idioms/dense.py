"""Linear layers and embeddings, with the weight as stored or transposed (GPT-2's Conv1D)."""

from __future__ import annotations

from typing import Any

import numpy as np

from maxport.idioms.base import Candidate, Recogniser
from maxport.ir import Node, Param, Ref

_TURNS = {"numpy_T", "permute", "t", "transpose"}


def match(recogniser: Recogniser) -> None:
    """Recognise every linear layer and embedding of the graph."""
    for node in list(recogniser.graph.nodes):
        candidate = _embedding(recogniser, node) or _linear(recogniser, node)
        if candidate is not None and recogniser.accept(candidate) and candidate.op == "linear":
            _take_bias(recogniser, node)


def _take_bias(recogniser: Recogniser, node: Node) -> None:
    """`x @ w.T + b` written as two operations."""
    users = recogniser.graph.users()[node.name]
    if node.attrs["bias"] is not None or len(users) != 1 or users[0].op != "add":
        return
    added = users[0]
    biases = [a for a in added.args if isinstance(a, Param)]
    weight: Param = node.attrs["weight"]
    width = weight.shape[1 if node.attrs["transposed"] else 0]
    if len(biases) != 1 or biases[0].shape != (width,) or added.attrs:
        return
    w, b = (recogniser.values.param(p.fqn) for p in (weight, biases[0]))
    w = w if node.attrs["transposed"] else w.T
    attrs = {**node.attrs, "bias": biases[0]}
    source = node.args[0]
    recogniser.accept(
        Candidate(added.name, "linear", [source], attrs, lambda x: np.matmul(x, w) + b)
    )


def _embedding(recogniser: Recogniser, node: Node) -> Candidate | None:
    if node.op != "embedding" or node.proof or not isinstance(node.args[0], Param):
        return None
    table, ids = node.args[0], node.args[1]
    weight = recogniser.values.param(table.fqn)
    return Candidate(node.name, "embedding", [ids], {"weight": table}, lambda i: weight[i])


def _parts(node: Node, nodes: dict[str, Node]) -> tuple[Any, Any, Any, bool] | None:
    """(x, weight, bias, transposed) of the four ways to write a linear layer."""
    args = node.args
    if node.op in ("matmul", "mm") and isinstance(args[1], Ref):
        turned = nodes[args[1].name]
        if turned.op in _TURNS and isinstance(turned.args[0], Param):
            return args[0], turned.args[0], None, False
    if node.op == "linear":
        return args[0], args[1], args[2] if len(args) > 2 else None, False
    if node.op == "addmm" and not node.attrs:
        return args[1], args[2], args[0], True
    if node.op in ("matmul", "mm") and isinstance(args[1], Param):
        return args[0], args[1], None, True
    return None


def _linear(recogniser: Recogniser, node: Node) -> Candidate | None:
    parts = None if node.proof else _parts(node, recogniser.graph.by_name())
    if parts is None:
        return None
    x, weight, bias, transposed = parts
    if not (isinstance(x, Ref) and isinstance(weight, Param) and len(weight.shape) == 2):
        return None
    if bias is not None and not isinstance(bias, Param):
        return None
    w = recogniser.values.param(weight.fqn)
    b = 0.0 if bias is None else recogniser.values.param(bias.fqn)
    w = w if transposed else w.T
    attrs = {"weight": weight, "bias": bias, "transposed": transposed}
    return Candidate(node.name, "linear", [x], attrs, lambda x: np.matmul(x, w) + b)
