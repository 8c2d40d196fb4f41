"""Rotary position embedding, measured as a matrix at every position.

Between a projection and the attention there may be any spelling of a rotation. Its effect is a
linear map of each head; feeding unit vectors gives the map itself, from which the rotated columns,
the pairing (halves or adjacent), the frequencies, the sign and the factor are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maxport.idioms.base import PROOF_TOKENS, Candidate, Recogniser
from maxport.ir import BATCH, TOKENS, Graph, Node, Ref

#: Models may store tables of sines in float32.
_STORED = 1e-6


@dataclass(frozen=True)
class Rotation:
    """One rotary embedding.

    Attributes:
        interleaved: Pairs are adjacent columns; otherwise column i pairs with i + width / 2.
        width: Columns that are rotated.
        offset: The first rotated column.
        sign: -1 where the rotation runs backwards.
        factor: Length of a rotated unit vector.
        freqs: Angle in radians per position, one for each pair.
    """

    interleaved: bool
    width: int
    offset: int
    sign: int
    factor: float
    freqs: tuple[float, ...]


def match(recogniser: Recogniser) -> None:
    """Turn every rotation in front of an attention into one `rope` node (x, positions)."""
    for node in list(recogniser.graph.nodes):
        if node.op == "attend":
            for arg in (node.args[0], node.args[1]):
                _match_above(recogniser, _before_norms(recogniser.graph, arg))


def _before_norms(graph: Graph, arg: Ref) -> Ref:
    """The value that norms between rotation and attention read, as in Hunyuan and nanochat."""
    nodes = graph.by_name()
    while True:
        node = nodes[arg.name]
        if node.op in ("rms_norm", "layer_norm") or (node.op == "transpose" and node.proof):
            arg = node.args[0]
        else:
            return arg


def _positional(graph: Graph) -> set[str]:
    """Names of values that depend on positions but not on tokens."""
    on_tokens: set[str] = {"tokens"}
    on_positions: set[str] = {"positions"}
    for node in graph.nodes:
        names = {r.name for r in node.refs()}
        if names & on_tokens:
            on_tokens.add(node.name)
        elif names & on_positions:
            on_positions.add(node.name)
    return on_positions


@dataclass
class _Cone:
    """What lies between the values that enter a rotation and its result."""

    nodes: dict[str, Node]
    leaves: set[str]
    mixing: set[str]


def _cone(graph: Graph, top: str, positional: set[str]) -> _Cone:
    nodes = graph.by_name()
    cone = _Cone({}, set(), set())
    stack = [top]
    while stack:
        name = stack.pop()
        node = nodes[name]
        if name in cone.nodes or name in cone.leaves:
            continue
        if node.proof or node.op == "input" or (name in positional):
            cone.leaves.add(name)
            continue
        cone.nodes[name] = node
        names = [r.name for r in node.refs()]
        if any(n in positional for n in names):
            cone.mixing.add(name)
        stack += [n for n in names if n not in positional]
    return cone


def _reaches_leaf_without(cone: _Cone, top: str, cut: str, positional: set[str]) -> bool:
    """Whether a leaf can be reached from `top` going up, not through `cut`."""
    stack, seen = [top], set()
    while stack:
        name = stack.pop()
        if name == cut or name in seen:
            continue
        seen.add(name)
        if name in cone.leaves:
            return True
        if name in cone.nodes:
            refs = cone.nodes[name].refs()
            stack += [r.name for r in refs if r.name not in positional]
    return False


def _between(cone: _Cone, top: str, cut: str) -> set[str]:
    stack, seen = [top], set()
    while stack:
        name = stack.pop()
        if name == cut or name in seen or name not in cone.nodes:
            continue
        seen.add(name)
        stack += [r.name for r in cone.nodes[name].refs()]
    return seen


def _match_above(recogniser: Recogniser, arg: Ref) -> None:
    graph = recogniser.graph
    positional = _positional(graph)
    cone = _cone(graph, arg.name, positional)
    if not cone.mixing:
        return
    order = [n.name for n in graph.nodes if n.name in cone.nodes or n.name in cone.leaves][::-1]
    gates = [n for n in order if not _reaches_leaf_without(cone, arg.name, n, positional)]
    for end in gates:
        inside = _between(cone, end, "")
        starts = [g for g in gates if g != end and order.index(g) > order.index(end)]
        for start in starts:
            inner = _between(cone, end, start)
            if not cone.mixing & inner or cone.mixing & (inside - inner):
                continue
            source = _source(graph, start, inner)
            if source is not None and _accept(recogniser, end, source):
                return


def _source(graph: Graph, start: str, inner: set[str]) -> Ref | None:
    """The value of `start` that the nodes `inner` read; None where they read several."""
    read = {r for n in graph.nodes if n.name in inner for r in n.refs() if r.name == start}
    return read.pop() if len(read) == 1 else None


def _accept(recogniser: Recogniser, end: str, source: Ref) -> bool:
    matrices = _matrices(recogniser, end, source)
    rotation = None if matrices is None else identify(*matrices)
    if rotation is None:
        return False
    node = recogniser.graph.by_name()[end]
    start_shape = _shape(recogniser, source)
    axis_in, axis_out = start_shape.index(TOKENS), node.shape.index(TOKENS)
    same_order = len(start_shape) == len(node.shape)
    if not same_order:
        return False

    def formula(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        moved = np.moveaxis(x, axis_in, 1)
        return np.moveaxis(rotate(moved, positions, rotation), 1, axis_out)

    attrs = {"rotation": rotation}
    inputs = [source, Ref("positions")]
    return recogniser.accept(Candidate(end, "rope", inputs, attrs, formula, tolerance=_STORED))


def rotate(x: np.ndarray, positions: np.ndarray, rotation: Rotation) -> np.ndarray:
    """Rotate heads: x (batch, tokens, ..., head_dim), positions (batch, tokens)."""
    low, high = rotation.offset, rotation.offset + rotation.width
    half = rotation.width // 2
    angle = positions[..., None] * np.asarray(rotation.freqs) * rotation.sign
    angle = angle.reshape(*angle.shape[:2], *([1] * (x.ndim - 3)), half)
    cos, sin = np.cos(angle) * rotation.factor, np.sin(angle) * rotation.factor
    block = x[..., low:high]
    out = x.copy()
    if rotation.interleaved:
        a, b = block[..., 0::2], block[..., 1::2]
        out[..., low:high:2], out[..., low + 1 : high : 2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = block[..., :half], block[..., half:]
        out[..., low : low + half] = a * cos - b * sin
        out[..., low + half : high] = b * cos + a * sin
    return out


def _shape(recogniser: Recogniser, ref: Ref) -> tuple:
    shape = recogniser.graph.by_name()[ref.name].shape
    chosen: tuple = shape if ref.part is None else shape[ref.part]
    return chosen


def _matrices(
    recogniser: Recogniser, end: str, source: Ref
) -> tuple[np.ndarray, np.ndarray] | None:
    """(positions, maps (positions, out, in)) of the piece from `source` to `end`."""
    node = recogniser.graph.by_name()[end]
    shape = _shape(recogniser, source)
    if not isinstance(node.shape, tuple) or shape.count(TOKENS) != 1 or shape[0] != BATCH:
        return None
    if node.shape.count(TOKENS) != 1 or node.shape[-1] != shape[-1] or shape[-1] == TOKENS:
        return None
    if not isinstance(shape[-1], int) or not 2 <= shape[-1] <= 512:
        return None
    width = shape[-1]
    batch = recogniser.values.batch
    positions = np.concatenate([np.arange(PROOF_TOKENS), np.arange(PROOF_TOKENS) * 5 + 3])
    maps = np.zeros((len(positions), width, width))
    for half in range(2):
        span = slice(half * PROOF_TOKENS, (half + 1) * PROOF_TOKENS)
        fed = np.broadcast_to(positions[span], (batch, PROOF_TOKENS)).copy()
        for low in range(0, width, batch):
            x = np.zeros(recogniser.concrete(shape))
            count = min(batch, width - low)
            for b in range(count):
                x[b, ..., low + b] = 1.0
            feed = {source.name: x if source.part is None else {source.part: x}}
            try:
                out = recogniser.values.run(end, {**feed, "positions": fed})
            except KeyError:
                return None
            out = np.moveaxis(out, node.shape.index(TOKENS), 1)
            flat = out.reshape(batch, PROOF_TOKENS, -1, width)
            if not np.allclose(flat, flat[:, :, :1], atol=1e-12):
                return None
            for b in range(count):
                maps[span, :, low + b] = flat[b, :, 0]
    return positions, maps


def identify(positions: np.ndarray, maps: np.ndarray) -> Rotation | None:
    """The rotation whose map at each position is given, or None if it is not one."""
    width = maps.shape[-1]
    eye = np.eye(width)
    moved = [i for i in range(width) if not np.allclose(maps[:, i], eye[i], atol=1e-9)]
    if not moved:
        return None
    offset, span = moved[0], len(moved)
    if span % 2 or moved != list(range(offset, offset + span)):
        offset, span = 0, width
        if width % 2:
            return None
    block = maps[:, offset : offset + span, offset : offset + span]
    half = span // 2
    for interleaved in (False, True):
        first = np.arange(0, span, 2) if interleaved else np.arange(half)
        second = first + 1 if interleaved else first + half
        cos, sin = block[:, first, first], block[:, second, first]
        rebuilt = np.zeros_like(block)
        rebuilt[:, first, first] = rebuilt[:, second, second] = cos
        rebuilt[:, second, first], rebuilt[:, first, second] = sin, -sin
        if not np.allclose(rebuilt, block, atol=1e-9):
            continue
        factor = np.hypot(cos, sin)
        if not np.allclose(factor, factor[0, 0], atol=1e-7):
            return None
        at_one = int(np.flatnonzero(positions == 1)[0])
        freqs = np.arctan2(sin[at_one], cos[at_one])
        sign = -1 if freqs[0] < 0 else 1
        freqs = freqs * sign
        angle = positions[:, None] * freqs * sign
        if not np.allclose(np.cos(angle) * factor, cos, atol=1e-5):
            return None
        if not np.allclose(np.sin(angle) * factor, sin, atol=1e-5):
            return None
        numbers = tuple(float(f) for f in freqs)
        return Rotation(interleaved, span, offset, sign, float(factor[0, 0]), numbers)
    return None
