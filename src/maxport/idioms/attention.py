"""Attention: through transformers' interface, or written out as softmax(f(q @ k^T)) @ v.

For written-out attention the function f between the scores and the softmax is probed with numbers:
its scale, its soft cap, its mask and its linear bias are measured, and anything else is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from maxport.errors import MaxportError
from maxport.idioms.base import PROOF_TOKENS, Recogniser
from maxport.ir import BATCH, TOKENS, Node, Param, Ref

_HIDDEN = -5e3


@dataclass(frozen=True)
class Scores:
    """What happens to the scores before the softmax."""

    scale: float
    mask: str
    window: int
    slopes: tuple[float, ...] = ()


def match(recogniser: Recogniser) -> None:
    """Turn every attention of the graph into one `attend` node (q, k, v[, sinks])."""
    for node in list(recogniser.graph.nodes):
        if node.op == "attention":
            _through_interface(recogniser, node)
    for node in list(recogniser.graph.nodes):
        if node.op == "softmax" and _square(node.shape):
            _written_out(recogniser, node)
    recogniser.graph.sweep()


def _mask_node(ref: Any, nodes: dict[str, Node]) -> Node | None:
    while isinstance(ref, Ref):
        node = nodes[ref.name]
        if node.op == "mask":
            return node
        ref = next((a for a in node.args if isinstance(a, Ref)), None)
    return None


def _through_interface(recogniser: Recogniser, node: Node) -> None:
    q, k, v, mask, sinks, scale, softcap, window, causal = node.args
    kind = "sliding" if window and causal else "causal" if causal else "bidirectional"
    if mask is not None:
        found = _mask_node(mask, recogniser.graph.by_name())
        if found is None:
            raise MaxportError(
                "an attention layer takes a mask that the model computes itself",
                where=f"{node.scope}, {node.line}",
                fix="port this layer by hand; its mask is no function of positions alone",
            )
        kind, window = found.args
    node.op, node.args = "attend", [q, k, v]
    node.attrs = {"scale": scale, "softcap": softcap, "mask": kind, "window": int(window)}
    if isinstance(sinks, Param):
        node.attrs["sinks"] = sinks
    node.proof = "transformers' attention interface, mask probed at 40 positions"
    recogniser.note("attention", node.scope, node.attrs, True, 0.0)


def _square(shape: Any) -> bool:
    return isinstance(shape, tuple) and len(shape) >= 3 and shape[-1] == shape[-2] == TOKENS


def _product_below(node: Node, nodes: dict[str, Node]) -> Node | None:
    """The q @ k^T above a softmax."""
    stack = [a for a in node.args if isinstance(a, Ref)]
    while stack:
        current = nodes[stack.pop(0).name]
        if current.op in ("matmul", "bmm", "baddbmm") and _square(current.shape):
            return current
        if isinstance(current.shape, tuple) and _square(current.shape):
            stack += [a for a in current.args if isinstance(a, Ref)]
    return None


def _product_above(node: Node, recogniser: Recogniser) -> Node | None:
    """The p @ v that consumes a softmax, through casts only."""
    users = recogniser.graph.users()
    current = node
    while True:
        readers = users[current.name]
        products = [
            u for u in readers if u.op in ("matmul", "bmm") and u.args[0] == Ref(current.name)
        ]
        if len(products) == 1:
            return products[0]
        if len(readers) != 1 or not _square(readers[0].shape):
            return None
        current = readers[0]


def _written_out(recogniser: Recogniser, softmax: Node) -> None:
    nodes = recogniser.graph.by_name()
    scores, result = _product_below(softmax, nodes), _product_above(softmax, recogniser)
    if scores is None or result is None or softmax.args[1] not in (-1, len(softmax.shape) - 1):
        return
    q, k_transposed = scores.args[-2:]
    measured = probe(recogniser, scores, softmax)
    if measured is None:
        recogniser.note("attention", softmax.scope, {}, False, float("inf"))
        return
    k = _insert_transpose(recogniser, k_transposed, result)
    v = result.args[1]
    result.op = "attend"
    result.args = [q, _unrepeated(recogniser, k), _unrepeated(recogniser, v)]
    result.attrs = {
        "scale": measured.scale,
        "softcap": 0.0,
        "mask": measured.mask,
        "window": measured.window,
    }
    if measured.slopes:
        result.attrs["slopes"] = measured.slopes
    result.proof = "scores probed at 0, 1 and 3 over all positions"
    result.scope = softmax.scope
    recogniser.note("attention", softmax.scope, result.attrs, True, 0.0)


def probe(recogniser: Recogniser, scores: Node, softmax: Node) -> Scores | None:
    """Measure the function from raw scores to the softmax's input; None if it is no known one."""
    shape = recogniser.concrete(scores.shape)
    positions = _positions(recogniser.values.batch)
    source = softmax.args[0]

    def at(level: float) -> np.ndarray:
        raw = np.full(shape, level)
        if scores.op == "baddbmm":
            added = recogniser.values.run(scores.args[0].name, positions)
            raw = scores.attrs.get("alpha", 1) * raw + scores.attrs.get("beta", 1) * added
        out = recogniser.values.run(source.name, {scores.name: raw, **positions})
        return np.asarray(out).reshape(-1, PROOF_TOKENS, PROOF_TOKENS)

    f0, f1, f3 = at(0.0), at(1.0), at(3.0)
    seen = f0 > _HIDDEN
    if not (seen == seen[:1]).all():
        return None
    visible = seen[0]
    gain = (f1 - f0)[:, visible]
    scale = float(np.median(gain))
    if np.abs(gain - scale).max() > 1e-6 or np.abs((f3 - f0)[:, visible] - 3 * scale).max() > 1e-5:
        return None
    named = _intersect(_name_mask(visible), _declared_mask(recogniser, softmax))
    slopes = _slopes(f0, visible, recogniser.values.batch)
    if named is None or slopes is None:
        return None
    return Scores(scale, *named, slopes)


def _declared_mask(recogniser: Recogniser, softmax: Node) -> tuple[str, int]:
    """The mask that transformers' interface made for these scores; it hides nothing here."""
    nodes = recogniser.graph.by_name()
    stack, seen = [softmax], set()
    while stack:
        node = stack.pop()
        if node.op == "mask":
            return node.args[0], node.args[1]
        if node.name in seen or node.proof:
            continue
        seen.add(node.name)
        stack += [nodes[r.name] for r in node.refs()]
    return "bidirectional", 0


def _intersect(
    measured: tuple[str, int] | None, declared: tuple[str, int]
) -> tuple[str, int] | None:
    """Both masks at once, where that is one of the known ones."""
    if measured is None or measured[0] == "bidirectional":
        return None if measured is None else declared
    if declared[0] in ("bidirectional", "causal") or declared == measured:
        return measured
    return declared if measured[0] == "causal" else None


def _positions(batch: int) -> dict[str, np.ndarray]:
    """The graph's inputs: every sequence at positions 0, 1, 2, ..."""
    return {
        "positions": np.broadcast_to(np.arange(PROOF_TOKENS), (batch, PROOF_TOKENS)).copy(),
        "tokens": np.ones((batch, PROOF_TOKENS), dtype=np.int64),
    }


def _name_mask(visible: np.ndarray) -> tuple[str, int] | None:
    i, j = np.arange(PROOF_TOKENS)[:, None], np.arange(PROOF_TOKENS)[None]
    if visible.all():
        return "bidirectional", 0
    if (visible == (j <= i)).all():
        return "causal", 0
    window = int(visible[-1].sum())
    if (visible == ((j <= i) & (i - j < window))).all():
        return "sliding", window
    return None


def _slopes(f0: np.ndarray, visible: np.ndarray, batch: int) -> tuple[float, ...] | None:
    """ALiBi slopes per head from the scores at raw score 0; () for none, None for another bias."""
    i, j = np.arange(PROOF_TOKENS)[:, None], np.arange(PROOF_TOKENS)[None]
    bias = f0 - np.diagonal(f0, axis1=1, axis2=2)[..., None]
    slope = -bias[:, -1, -2]
    expected = -slope[:, None, None] * (i - j)
    if np.abs(bias - expected)[:, visible].max() > 1e-5:
        return None
    if np.abs(slope).max() < 1e-9:
        return ()
    heads = len(slope) // batch if len(slope) % batch == 0 else len(slope)
    return tuple(float(s) for s in slope[:heads])


def _insert_transpose(recogniser: Recogniser, k_transposed: Ref, before: Node) -> Ref:
    """The keys themselves: undo the transpose of k^T, or add one."""
    node = recogniser.graph.by_name()[k_transposed.name]
    rank = len(node.shape)
    if node.op == "transpose" and {a % rank for a in node.args[1:3]} == {rank - 1, rank - 2}:
        keys: Ref = node.args[0]
        return keys
    shape = (*node.shape[:-2], node.shape[-1], node.shape[-2])
    added = Node(
        f"{node.name}_keys", "transpose", [k_transposed, -2, -1], {}, shape, node.dtype,
        node.scope, node.classes, "undoes the transpose of k^T", node.line,
    )  # fmt: skip
    nodes = recogniser.graph.nodes
    nodes.insert(nodes.index(before), added)
    return Ref(added.name)


def _unrepeated(recogniser: Recogniser, ref: Ref) -> Ref:
    """Keys or values before `repeat_kv`: heads that are only copied are not stored."""
    nodes = recogniser.graph.by_name()
    node = nodes[ref.name]
    if node.op != "reshape" or len(node.shape) != 4 or not isinstance(node.args[0], Ref):
        return ref
    expanded = nodes[node.args[0].name]
    if expanded.op != "expand" or not isinstance(expanded.args[0], Ref):
        return ref
    inner = nodes[expanded.args[0].name]
    while inner.op in ("slice", "unsqueeze") and isinstance(inner.args[0], Ref):
        inner = nodes[inner.args[0].name]
    if len(inner.shape) != 4 or not isinstance(inner.shape[1], int) or inner.shape[0] != BATCH:
        return ref
    data = recogniser.array(Ref(inner.name))
    repeats = node.shape[1] // inner.shape[1]
    truth = recogniser.values.run(node.name, {inner.name: data})
    same = truth.shape == (wide := np.repeat(data, repeats, axis=1)).shape and (truth == wide).all()
    return Ref(inner.name) if same else ref
