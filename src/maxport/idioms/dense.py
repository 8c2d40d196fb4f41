"""Linear layers and embeddings, with the weight as stored or transposed (GPT-2's Conv1D)."""

from __future__ import annotations

from typing import Any

import numpy as np

from maxport.idioms.base import Candidate, Recogniser
from maxport.ir import Node, Param, Ref


def match(recogniser: Recogniser) -> None:
    """Recognise every linear layer and embedding of the graph."""
    for node in list(recogniser.graph.nodes):
        candidate = _embedding(recogniser, node) or _linear(recogniser, node)
        if candidate is not None:
            recogniser.accept(candidate)


def _embedding(recogniser: Recogniser, node: Node) -> Candidate | None:
    if node.op != "embedding" or node.proof or not isinstance(node.args[0], Param):
        return None
    table, ids = node.args[0], node.args[1]
    weight = recogniser.values.param(table.fqn)
    return Candidate(node.name, "embedding", [ids], {"weight": table}, lambda i: weight[i])


def _parts(node: Node) -> tuple[Any, Any, Any, bool] | None:
    """(x, weight, bias, transposed) of the three ways to write a linear layer."""
    args = node.args
    if node.op == "linear":
        return args[0], args[1], args[2] if len(args) > 2 else None, False
    if node.op == "addmm" and not node.attrs:
        return args[1], args[2], args[0], True
    if node.op in ("matmul", "mm") and isinstance(args[1], Param):
        return args[0], args[1], None, True
    return None


def _linear(recogniser: Recogniser, node: Node) -> Candidate | None:
    parts = None if node.proof else _parts(node)
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
