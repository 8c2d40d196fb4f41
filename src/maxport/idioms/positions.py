"""Sinusoidal position embeddings: rows of a table that the model computes when it is made."""

from __future__ import annotations

import numpy as np

from maxport.idioms.base import Candidate, Recogniser, relative_difference
from maxport.ir import Node, Param, Ref

#: Tables are stored in float32 or bfloat16.
_STORED = 8e-3


def match(recogniser: Recogniser) -> None:
    """Recognise look-ups of positions in a table of sines and cosines."""
    for node in list(recogniser.graph.nodes):
        found = _lookup(node)
        if found is not None:
            _accept(recogniser, node, *found)


def _lookup(node: Node) -> tuple[Param, Ref] | None:
    """(table, positions) of a look-up in a table that no checkpoint holds."""
    if node.op == "embedding":
        table, ids = (node.attrs["weight"], node.args[0]) if node.proof else node.args[:2]
    elif node.op == "index_select" and node.args[1] == 0:
        table, ids = node.args[0], node.args[2]
    elif node.op == "index" and len(node.args[1]) == 1:
        table, ids = node.args[0], node.args[1][0]
    else:
        return None
    if isinstance(table, Param) and table.buffer and len(table.shape) == 2 and isinstance(ids, Ref):
        return table, ids
    return None


def sinusoids(
    positions: np.ndarray, width: int, steps: int, zero_row: int | None = None
) -> np.ndarray:
    """Sines then cosines of `positions * 10000 ** (-i / steps)`, (..., width); one row of zeros."""
    angle = positions[..., None] * 10000.0 ** (-np.arange(width // 2) / steps)
    rows = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
    return rows if zero_row is None else rows * (positions != zero_row)[..., None]


def _accept(recogniser: Recogniser, node: Node, table: Param, ids: Ref) -> None:
    width = table.shape[1]
    stored = recogniser.values.param(table.fqn)
    empty = np.flatnonzero(~stored.any(axis=1))
    if len(empty) > 1:
        return
    zero_row = {"zero_row": int(empty[0])} if len(empty) else {}
    for steps in (width // 2, width // 2 - 1):
        attrs = {"width": width, "steps": steps, **zero_row}
        # The proof's positions are few: the whole table must agree as well.
        whole = sinusoids(np.arange(len(stored), dtype=np.float64), **attrs)
        if relative_difference(stored, whole) > _STORED:
            continue
        candidate = Candidate(
            node.name,
            "sinusoids",
            [ids],
            attrs,
            lambda p, attrs=attrs: sinusoids(p, **attrs),
            tolerance=_STORED,
            low=2,
        )
        if recogniser.accept(candidate):
            return
