"""From (batch, length) to ragged: every value's token axis first, its batch axis gone.

MAX runs the tokens of all requests end to end on one axis, `total`. This pass rewrites a recognised
graph so that each value is (total, ...) and each operation is the one that computes it there;
transposes that only bring heads in front of tokens vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from maxport.errors import MaxportError
from maxport.ir import BATCH, ODD, TOKENS, Const, Graph, Merged, Node, Param, Ref, Size

_ELEMENTWISE = {
    "abs", "activation", "add", "cast", "clamp", "cos", "div", "eq", "erf", "exp", "expm1", "floor",
    "floor_divide", "gate", "ge", "gelu", "gt", "le", "log", "log1p", "logical_and", "lt",
    "masked_fill", "maximum", "max", "min", "minimum", "mul", "multiplier", "ne", "neg", "pow",
    "reciprocal", "relu", "residual", "rsqrt", "rsub", "sigmoid", "silu", "sin", "softcap",
    "softplus", "sqrt", "square", "sub", "tanh", "where",
}  # fmt: skip
_LAST_AXIS = {"layer_norm", "linear", "rms_norm"}
_END = 9223372036854775807


@dataclass
class Layout:
    """How the logical axes of a value lie in its ragged form."""

    logical: tuple[Size, ...]

    @property
    def token_axis(self) -> int | None:
        """Index of the logical axis that holds tokens."""
        found = [i for i, s in enumerate(self.logical) if isinstance(s, Merged) and s.tokens]
        return found[0] if found else None

    @property
    def order(self) -> list[int]:
        """Logical axes in ragged order: tokens, then the rest; the batch axis is left out."""
        token = self.token_axis
        rest = [i for i, s in enumerate(self.logical) if i != token and s != BATCH]
        return rest if token is None else [token, *rest]

    @property
    def shape(self) -> tuple[Size, ...]:
        """The ragged shape."""
        return tuple(self.size(i) for i in self.order)

    def size(self, axis: int) -> Size:
        """Ragged size of one logical axis."""
        value = self.logical[axis]
        if isinstance(value, int):
            return value
        return TOKENS if value.tokens else value.rest

    def axis(self, logical: int) -> int:
        """Ragged position of a logical axis."""
        return self.order.index(logical % len(self.logical))

    def around_tokens(self) -> tuple[int, int]:
        """Elements in front of and behind the token axis."""
        token = self.token_axis
        if token is None:
            return prod(s if isinstance(s, int) else s.rest for s in self.logical), 1
        sizes = [s if isinstance(s, int) else s.rest for s in self.logical]
        return prod(sizes[:token]), prod(sizes[token + 1 :])


def check(node: Node, shape: tuple[Size, ...]) -> None:
    """Refuse shapes that have no ragged form.

    Raises:
        MaxportError: More than one token axis, or one that the model crops or shifts.
    """
    tokens = [s for s in shape if isinstance(s, Merged) and s.tokens]
    bad = len(tokens) > 1 or any(s == ODD or s.rest != 1 for s in tokens)
    if bad:
        raise MaxportError(
            f"the operation {node.op} gives a tensor of shape {shape}, which has no ragged form",
            where=f"{node.scope or 'the model itself'}, {node.line}",
            fix="this layer mixes tokens with each other outside of attention; port it by hand",
        )


@dataclass
class _Pass:
    graph: Graph
    out: list[Node] = field(default_factory=list)
    env: dict[Ref, tuple[Any, Layout]] = field(default_factory=dict)
    count: int = 0

    def read(self, value: Any) -> tuple[Any, Layout]:
        """The ragged value and layout of an argument."""
        if isinstance(value, Param | Const):
            return value, Layout(value.shape)
        return self.env[value]

    def emit(self, node: Node, op: str, args: list[Any], shape: Any, **attrs: Any) -> Ref:
        """Append an auxiliary node that is part of how `node` is written."""
        self.count += 1
        name = f"{node.name}_{self.count}"
        self.out.append(replace(node, name=name, op=op, args=args, attrs=attrs, shape=shape))
        return Ref(name)

    def reshaped(self, node: Node, value: Any, have: Sequence[Size], want: Sequence[Size]) -> Any:
        """`value` with shape `want`, unchanged where it has that shape."""
        if tuple(have) == tuple(want):
            return value
        return self.emit(node, "reshape", [value], tuple(want))

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node.op == "mask":
                continue
            for shape in node.shape if isinstance(node.shape, list) else [node.shape]:
                if node.op != "input":
                    check(node, shape)
            self.node(node)
        output, _ = self.env[self.graph.output]
        graph = Graph(self.out, output, self.graph.traced)
        graph.sweep()
        return graph

    def define(self, node: Node, value: Any, part: int | None = None) -> None:
        shape = node.shape if part is None else node.shape[part]
        key = Ref(node.name, part)
        self.env[key] = (value, Layout(shape))

    def keep(self, node: Node, args: list[Any], **attrs: Any) -> None:
        """Append `node` itself with ragged arguments and shape."""
        several = isinstance(node.shape, list)
        shapes = [Layout(s).shape for s in (node.shape if several else [node.shape])]
        self.out.append(
            replace(node, args=args, attrs=attrs, shape=shapes if several else shapes[0])
        )
        for i in range(len(shapes)):
            part = i if several else None
            self.define(node, Ref(node.name, part), part)

    def node(self, node: Node) -> None:
        handler = getattr(self, f"_{node.op.replace('.', '_')}", None)
        if handler is not None:
            handler(node)
        elif node.op in _ELEMENTWISE:
            self._elementwise(node)
        elif node.op in _LAST_AXIS:
            value, layout = self.read(node.args[0])
            if layout.order[-1] != len(layout.logical) - 1:
                raise MaxportError(
                    f"{node.op} works on the token axis",
                    where=f"{node.scope}, {node.line}",
                    fix="port this layer by hand",
                )
            self.keep(node, [value], **node.attrs)
        else:
            raise MaxportError(
                f"the operation {node.op} has no lowering",
                where=f"{node.scope or 'the model itself'}, {node.line}",
                fix="report the model, or port this layer by hand",
            )

    # operations, by name

    def _input(self, node: Node) -> None:
        self.keep(node, [])

    def _elementwise(self, node: Node) -> None:
        result = Layout(node.shape)
        args = [
            self._aligned(node, a, result) if isinstance(a, Ref | Param | Const) else a
            for a in node.args
        ]
        attrs = {
            k: self._aligned(node, v, result) if isinstance(v, Ref | Param | Const) else v
            for k, v in node.attrs.items()
        }
        self.keep(node, args, **attrs)

    def _aligned(self, node: Node, arg: Any, result: Layout) -> Any:
        """An operand in the shape that broadcasts to the ragged result."""
        value, layout = self.read(arg)
        shift = len(result.logical) - len(layout.logical)
        want: list[Size] = []
        for axis in result.order:
            missing = axis < shift
            want.append(1 if missing else layout.size(axis - shift))
        has_tokens = layout.token_axis is not None
        while not has_tokens and want and want[0] == 1:
            want.pop(0)
        return self.reshaped(node, value, layout.shape, want)

    def _embedding(self, node: Node) -> None:
        if node.proof:
            self.keep(node, [self.read(node.args[0])[0]], **node.attrs)
            return
        table, ids = self.read(node.args[0])[0], self.read(node.args[1])[0]
        self.keep(node, [table, ids])

    def _sinusoids(self, node: Node) -> None:
        self.keep(node, [self.read(node.args[0])[0]], **node.attrs)

    def _attend(self, node: Node) -> None:
        args = []
        for arg in node.args:
            value, layout = self.read(arg)
            shape = layout.shape
            want = shape if len(shape) == 3 else (TOKENS, 1, shape[-1])
            args.append(self.reshaped(node, value, shape, want))
        self.keep(node, args, **node.attrs)

    def _rope(self, node: Node) -> None:
        value, layout = self.read(node.args[0])
        shape = layout.shape
        if len(shape) == 3:
            self.keep(node, [value], **node.attrs)
            return
        wide = self.reshaped(node, value, shape, (TOKENS, 1, shape[-1]))
        name = self.emit(node, "rope", [wide], (TOKENS, 1, shape[-1]), **node.attrs)
        self.define(node, self.reshaped(node, name, (TOKENS, 1, shape[-1]), shape))

    def _reshape(self, node: Node) -> None:
        value, layout = self.read(node.args[0])
        result = Layout(node.shape)
        if layout.shape != result.shape and layout.around_tokens() != result.around_tokens():
            raise MaxportError(
                "a reshape moves values between tokens",
                where=f"{node.scope}, {node.line}",
                fix="port this layer by hand",
            )
        self.define(node, self.reshaped(node, value, layout.shape, result.shape))
        self._mark(node)

    def _mark(self, node: Node) -> None:
        """Give the last emitted node this node's proof, so that coverage follows it."""
        if self.out:
            self.out[-1].proof = self.out[-1].proof or node.proof

    _unsqueeze = _squeeze = _reshape

    def _permuted(self, node: Node, axes: list[int]) -> None:
        value, layout = self.read(node.args[0])
        result = Layout(node.shape)
        order = [layout.axis(axes[i]) for i in result.order]
        if order != list(range(len(order))):
            value = self.emit(node, "permute", [value], result.shape, axes=order)
        self.define(node, value)

    def _transpose(self, node: Node) -> None:
        rank = len(node.shape)
        axes = list(range(rank))
        a, b = node.args[1] % rank, node.args[2] % rank
        axes[a], axes[b] = axes[b], axes[a]
        self._permuted(node, axes)

    def _permute(self, node: Node) -> None:
        self._permuted(node, [a % len(node.shape) for a in node.args[1]])

    def _expand(self, node: Node) -> None:
        value, layout = self.read(node.args[0])
        result = Layout(node.shape)
        value = self._aligned(node, node.args[0], result)
        have = self._aligned_shape(layout, result)
        if tuple(have) != result.shape and prod(_ints(have)) != prod(_ints(result.shape)):
            value = self.emit(node, "broadcast_to", [value], result.shape)
        self.define(node, value)

    def _aligned_shape(self, layout: Layout, result: Layout) -> list[Size]:
        shift = len(result.logical) - len(layout.logical)
        return [1 if a < shift else layout.size(a - shift) for a in result.order]

    def _slice(self, node: Node) -> None:
        value, layout = self.read(node.args[0])
        args = [*node.args, None, None, None, None][1:5]
        axis, start, stop, step = args[0] or 0, args[1] or 0, args[2], args[3] or 1
        result = Layout(node.shape)
        if layout.shape == result.shape:
            self.define(node, value)
            return
        position = layout.axis(axis)
        width = layout.shape[position]
        if not isinstance(width, int) or not isinstance(start, int):
            raise MaxportError(
                "a slice crops the token axis",
                where=f"{node.scope}, {node.line}",
                fix="port this layer by hand",
            )
        start = start + width if start < 0 else start
        stop = width if stop is None or stop == _END else stop
        stop = stop + width if stop < 0 else min(stop, width)
        attrs = {"axis": position, "start": start, "stop": stop, "step": step}
        self.define(node, self.emit(node, "slice", [value], result.shape, **attrs))

    def _select(self, node: Node) -> None:
        value, layout = self.read(node.args[0])
        position = layout.axis(node.args[1])
        index = node.args[2]
        width = layout.shape[position]
        if not isinstance(width, int):
            raise MaxportError(
                "one token is picked out of each sequence",
                where=f"{node.scope}, {node.line}",
                fix="port this layer by hand",
            )
        index = index + width if index < 0 else index
        shape = Layout(node.shape).shape
        self.define(node, self.emit(node, "select", [value], shape, axis=position, index=index))

    def _parts(self, node: Node, axis: int) -> None:
        value, layout = self.read(node.args[0])
        position = layout.axis(axis)
        shapes = [Layout(s).shape for s in node.shape]
        sizes = [s[position] for s in shapes]
        ref = self.emit(node, "split", [value], shapes, sizes=sizes, axis=position)
        for i in range(len(shapes)):
            self.define(node, Ref(ref.name, i), i)

    def _chunk(self, node: Node) -> None:
        self._parts(node, node.args[2] if len(node.args) > 2 else node.attrs.get("dim", 0))

    _split = _split_with_sizes = _chunk

    def _unbind(self, node: Node) -> None:
        axis = node.args[1] if len(node.args) > 1 else node.attrs.get("dim", 0)
        value, layout = self.read(node.args[0])
        position = layout.axis(axis)
        for i, shape in enumerate(node.shape):
            attrs = {"axis": position, "index": i}
            ref = self.emit(node, "select", [value], Layout(shape).shape, **attrs)
            self.define(node, ref, i)

    def _cat(self, node: Node) -> None:
        axis = node.args[1] if len(node.args) > 1 else node.attrs.get("dim", 0)
        result = Layout(node.shape)
        values = [self.read(a)[0] for a in node.args[0]]
        self.keep(node, [values], axis=result.axis(axis))

    def _stack(self, node: Node) -> None:
        axis = node.args[1] if len(node.args) > 1 else node.attrs.get("dim", 0)
        result = Layout(node.shape)
        position = result.axis(axis)
        self.keep(node, [[self.read(a)[0] for a in node.args[0]]], axis=position)

    def _reduced(self, node: Node) -> None:
        value, layout = self.read(node.args[0])
        axes = node.args[1] if len(node.args) > 1 else list(range(len(layout.logical)))
        axes = [axes] if isinstance(axes, int) else axes
        positions = sorted(layout.axis(a) for a in axes)
        if layout.token_axis is not None and 0 in positions:
            raise MaxportError(
                f"{node.op} runs over the token axis",
                where=f"{node.scope}, {node.line}",
                fix="port this layer by hand",
            )
        self.keep(node, [value], axes=positions, keep=bool([*node.args, 0, 0, 0][2]))

    _mean = _sum = _amax = _reduced

    def _softmax(self, node: Node) -> None:
        value, layout = self.read(node.args[0])
        self.keep(node, [value], axis=layout.axis(node.args[1]))

    def _index(self, node: Node) -> None:
        """`table[ids]` on the first axis, with one integer index."""
        source, layout = self.read(node.args[0])
        chosen = [(i, a) for i, a in enumerate(node.args[1]) if a is not None]
        if len(chosen) != 1:
            raise MaxportError(
                "an index with several tensors has no lowering",
                where=f"{node.scope}, {node.line}",
                fix="port this layer by hand",
            )
        axis, ids = chosen[0]
        index, _ = self.read(ids)
        self.keep(node, [source, index], axis=layout.axis(axis))

    def _matmul(self, node: Node) -> None:
        (a, left), (b, right) = self.read(node.args[0]), self.read(node.args[1])
        if right.token_axis is not None or len(right.logical) != 2:
            raise MaxportError(
                "a matrix product between tokens outside of attention has no lowering",
                where=f"{node.scope}, {node.line}",
                fix="port this layer by hand",
            )
        del left
        self.keep(node, [a, b])


def _ints(shape: Sequence[Size]) -> list[int]:
    return [s if isinstance(s, int) else s.rest for s in shape]


def merge_slices(graph: Graph) -> None:
    """Turn slices that tile one axis of a value into one `split`, which is how people write it."""
    by_source: dict[tuple[Any, int], list[Node]] = {}
    for node in graph.nodes:
        if node.op == "slice" and node.attrs["step"] == 1:
            by_source.setdefault((node.args[0], node.attrs["axis"]), []).append(node)
    for (source, axis), pieces in by_source.items():
        bounds = sorted({(p.attrs["start"], p.attrs["stop"]) for p in pieces})
        width = _width(graph, source, axis)
        edges = [0, *[stop for _, stop in bounds]]
        tiled = [start for start, _ in bounds] == edges[:-1] and edges[-1] == width
        if not tiled or len(bounds) < 2:
            continue
        first = pieces[0]
        shapes = []
        for bound in bounds:
            piece = next(p for p in pieces if (p.attrs["start"], p.attrs["stop"]) == bound)
            shapes.append(piece.shape)
        sizes = [stop - start for start, stop in bounds]
        name = f"{first.name}_parts"
        split = replace(
            first, name=name, op="split", args=[source],
            attrs={"sizes": sizes, "axis": axis}, shape=shapes,
        )  # fmt: skip
        graph.nodes.insert(graph.nodes.index(first), split)
        for piece in pieces:
            part = bounds.index((piece.attrs["start"], piece.attrs["stop"]))
            graph.replace(Ref(piece.name), Ref(name, part))
            graph.nodes.remove(piece)


def _width(graph: Graph, source: Any, axis: int) -> Size | None:
    if not isinstance(source, Ref):
        return source.shape[axis] if isinstance(source, Param) else None
    shape = graph.by_name()[source.name].shape
    size: Size = (shape if source.part is None else shape[source.part])[axis]
    return size


def to_ragged(graph: Graph) -> Graph:
    """The ragged form of a recognised graph.

    Returns:
        A new graph whose values are (total, ...); `rope` has lost its positions argument, `attend`
        takes (total, heads, head_dim) queries, keys and values.

    Raises:
        MaxportError: An operation mixes tokens outside of attention, or has no lowering.
    """
    ragged = _Pass(graph).run()
    merge_slices(ragged)
    ragged.sweep()
    return ragged
