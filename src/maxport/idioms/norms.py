"""RMSNorm and LayerNorm in all their variants, anchored at the reciprocal square root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from maxport.idioms.base import Candidate, Recogniser, weight_of
from maxport.ir import Node, Param, Ref


@dataclass
class _Core:
    """`x * rsqrt(mean(x**2) + eps)`, perhaps with the mean taken off first."""

    source: Ref
    last: Node
    eps: float
    centred: bool


def match(recogniser: Recogniser) -> None:
    """Recognise every norm of the graph."""
    for node in list(recogniser.graph.nodes):
        if node.op in ("layer_norm", "rms_norm") and not node.proof:
            _composite(recogniser, node)
    for node in list(recogniser.graph.nodes):
        core = _core(recogniser, node)
        if core is not None:
            _longest(recogniser, core)


def norm_formula(
    x: np.ndarray,
    weight: np.ndarray | float,
    bias: np.ndarray | float,
    eps: float,
    *,
    centred: bool,
    offset: float = 0.0,
) -> np.ndarray:
    """LayerNorm (centred) or RMSNorm over the last axis, float64."""
    if centred:
        x = x - x.mean(-1, keepdims=True)
    normal = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    out: np.ndarray = normal * (offset + weight) + bias
    return out


def _attrs(
    op: str, weight: Param | None, bias: Param | None, eps: float, offset: float, **rest: Any
) -> dict[str, Any]:
    attrs: dict[str, Any] = {"weight": weight, "eps": eps, "offset": offset, **rest}
    if op == "layer_norm":
        attrs["bias"] = bias
    return attrs


def _candidate(
    recogniser: Recogniser,
    final: str,
    source: Ref,
    *,
    op: str,
    weight: Param | None,
    bias: Param | None,
    eps: float,
    offset: float,
    multiply_before_cast: bool,
    keep_dtype: bool,
) -> Candidate:
    values = recogniser.values
    w: Any = 1.0 if weight is None else values.param(weight.fqn)
    b: Any = 0.0 if bias is None else values.param(bias.fqn)
    attrs = _attrs(op, weight, bias, eps, offset if weight is not None else 0.0)
    if op == "rms_norm":
        attrs["multiply_before_cast"] = multiply_before_cast
    else:
        attrs["keep_dtype"] = keep_dtype
    shift = offset if weight is not None else 0.0
    centred = op == "layer_norm"

    def formula(x: np.ndarray) -> np.ndarray:
        return norm_formula(x, w, b, eps, centred=centred, offset=shift)

    return Candidate(final, op, [source], attrs, formula)


def _composite(recogniser: Recogniser, node: Node) -> None:
    """ATen's own layer_norm and rms_norm."""
    args = [*node.args, None, None, None][:5]
    if node.op == "layer_norm":
        source, shape, weight, bias, eps = args
        eps = 1e-5 if eps is None else eps
    else:
        source, shape, weight, eps, _ = args
        bias = None
    if len(shape) != 1 or eps is None:
        return
    nodes = recogniser.graph.by_name()
    param, offset = weight_of(weight, nodes) if weight is not None else (None, 0.0)
    shift, extra = weight_of(bias, nodes) if bias is not None else (None, 0.0)
    if (weight is not None and param is None) or (bias is not None and shift is None) or extra:
        return
    inner = nodes[source.name]
    wide = inner.op == "cast" and inner.dtype == "float32" and node.op == "layer_norm"
    users = recogniser.graph.users()[node.name]
    final, keep = node, True
    if wide and len(users) == 1 and users[0].op == "cast":
        source, final, keep = inner.args[0], users[0], False
    recogniser.accept(
        _candidate(
            recogniser,
            final.name,
            source,
            op=node.op,
            weight=param,
            bias=shift,
            eps=float(eps),
            offset=offset,
            multiply_before_cast=True,
            keep_dtype=keep,
        )
    )


def _root(node: Node, nodes: dict[str, Node]) -> Node | None:
    """The variance-plus-eps node under a reciprocal square root, in its three spellings."""
    if node.op == "rsqrt" or (node.op == "pow" and node.args[1] == -0.5):
        return nodes.get(node.args[0].name) if isinstance(node.args[0], Ref) else None
    return None


def _core(recogniser: Recogniser, node: Node) -> _Core | None:
    nodes = recogniser.graph.by_name()
    if node.name not in nodes:
        return None
    total = _root(node, nodes)
    if total is None or total.op != "add":
        return None
    numbers = [a for a in total.args if isinstance(a, int | float)]
    refs = [a for a in total.args if isinstance(a, Ref)]
    if len(numbers) != 1 or len(refs) != 1:
        return None
    mean = nodes[refs[0].name]
    if mean.op != "mean" or mean.args[1] != [-1] or not isinstance(mean.args[0], Ref):
        return None
    square = nodes[mean.args[0].name]
    is_square = (square.op == "pow" and square.args[1] == 2) or square.op == "square"
    if square.op == "mul" and square.args[0] == square.args[1]:
        is_square = True
    if not is_square:
        return None
    inner = square.args[0]
    product = [
        u
        for u in recogniser.graph.users()[node.name]
        if u.op == "mul" and inner in u.args and Ref(node.name) in u.args
    ]
    if len(product) != 1:
        return None
    source, centred = _centred(inner, nodes)
    return _Core(source, product[0], float(numbers[0]), centred)


def _centred(inner: Ref, nodes: dict[str, Node]) -> tuple[Ref, bool]:
    node = nodes[inner.name]
    if node.op == "sub" and isinstance(node.args[0], Ref) and isinstance(node.args[1], Ref):
        mean = nodes[node.args[1].name]
        if mean.op == "mean" and mean.args[0] == node.args[0] and mean.args[1] == [-1]:
            return node.args[0], True
    return inner, False


def _longest(recogniser: Recogniser, core: _Core) -> None:
    """Grow the core over casts, the weight and the bias; accept the longest that agrees."""
    graph = recogniser.graph
    nodes, users = graph.by_name(), graph.users()
    source = core.source
    narrow = nodes[source.name].dtype
    if nodes[source.name].op == "cast":
        source = nodes[source.name].args[0]
        narrow = nodes[source.name].dtype if isinstance(source, Ref) else narrow
    weight: Param | None = None
    bias: Param | None = None
    offset = 0.0
    before_cast = True
    steps = [(core.last, weight, bias, offset, before_cast)]
    node = core.last
    while len(users[node.name]) == 1:
        step = users[node.name][0]
        others = [a for a in step.args if a != Ref(node.name)]
        if step.op == "cast":
            before_cast = before_cast and weight is not None
        elif step.op == "mul" and len(others) == 1 and weight is None:
            weight, offset = weight_of(others[0], nodes)
            if weight is None or len(weight.shape) != 1:
                break
        elif step.op == "add" and len(others) == 1 and bias is None and weight is not None:
            bias, extra = weight_of(others[0], nodes)
            if bias is None or extra:
                break
        else:
            break
        node = step
        steps.append((node, weight, bias, offset, before_cast))
    for last, w, b, o, early in reversed(steps):
        if last.dtype != narrow:
            continue
        op = "layer_norm" if core.centred else "rms_norm"
        candidate = _candidate(
            recogniser,
            last.name,
            source,
            op=op,
            weight=w,
            bias=b,
            eps=core.eps,
            offset=o,
            multiply_before_cast=early and w is not None,
            keep_dtype=False,
        )
        if recogniser.accept(candidate):
            return
