"""How each operation of a ragged graph is written in Python for MAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxport.emit.expr import Expr
from maxport.emit.tables import Rope, Slopes
from maxport.errors import MaxportError
from maxport.ir import TOKENS, Node, Param, Ref

if TYPE_CHECKING:
    from maxport.emit.forward import Printer


@dataclass(frozen=True)
class Text:
    """An expression and whether it can be an operand as it stands."""

    text: str
    atom: bool = True

    @property
    def operand(self) -> str:
        """The expression as an operand."""
        return self.text if self.atom else f"({self.text})"


F_IMPORT = "from max.experimental import functional as F"
DTYPE_IMPORT = "from max.dtype import DType"
BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "residual": "+", "gate": "*"}
_COMPARE = {"gt": ">", "ge": ">="}
_UNARY = {
    "abs": "F.abs", "cos": "F.cos", "erf": "F.erf", "exp": "F.exp", "floor": "F.floor",
    "log": "F.log", "neg": "-", "relu": "F.relu", "rsqrt": "F.rsqrt", "sigmoid": "F.sigmoid",
    "silu": "F.silu", "sin": "F.sin", "sqrt": "F.sqrt", "tanh": "F.tanh", "log1p": "F.log1p",
}  # fmt: skip
_ACTIVATIONS = {
    "silu": "F.silu({})", "gelu": "F.gelu({})", "gelu_tanh": 'F.gelu({}, approximate="tanh")',
    "quick_gelu": 'F.gelu({}, approximate="quick")', "relu": "F.relu({})",
    "sigmoid": "F.sigmoid({})", "tanh": "F.tanh({})",
}  # fmt: skip


def print_op(p: Printer, node: Node) -> Text:
    """One operation as an expression.

    Raises:
        MaxportError: The operation has no lowering.
    """
    printer = _PRINTERS.get(node.op)
    if printer is not None:
        return printer(p, node)
    if node.op in BINARY or node.op in _COMPARE:
        return _binary(p, node)
    if node.op in _UNARY:
        operand = p.value(node.args[0])
        symbol = _UNARY[node.op]
        if symbol == "-":
            return Text(f"-{operand.operand}", False)
        p.body.imports.add(F_IMPORT)
        return Text(f"{symbol}({operand.text})")
    raise MaxportError(
        f"the operation {node.op} has no lowering",
        where=f"{node.scope}, {node.line}",
        fix="report the model, or port this layer by hand",
    )


def _operand(p: Printer, node: Node, position: int) -> Text:
    arg = node.args[position]
    if isinstance(arg, Ref | Param):
        return p.value(arg)
    return p.literal(node, f"arg{position}")


def _binary(p: Printer, node: Node) -> Text:
    left, right = _operand(p, node, 0), _operand(p, node, 1)
    symbol = BINARY.get(node.op) or _COMPARE[node.op]
    loose = symbol == "+"
    a = left.text if loose else left.operand
    return Text(f"{a} {symbol} {right.operand}", False)


def _multiplier(p: Printer, node: Node) -> Text:
    source = p.value(node.args[0])
    symbol = "/" if node.attrs["divide"] else "*"
    return Text(f"{source.operand} {symbol} {p.literal(node, 'by').operand}", False)


def _activation(p: Printer, node: Node) -> Text:
    source = p.value(node.args[0])
    kind = node.attrs["kind"]
    if kind == "relu2":
        p.body.helpers.add("squared_relu")
        return Text(f"squared_relu({source.text})")
    if kind == "softplus":
        p.body.imports.add(F_IMPORT)
        return Text(f"F.log(1.0 + F.exp({source.text}))")
    p.body.imports.add(F_IMPORT)
    return Text(_ACTIVATIONS[kind].format(source.text))


def _softcap(p: Printer, node: Node) -> Text:
    p.body.helpers.add("softcap")
    return Text(f"softcap({p.value(node.args[0]).text}, {p.literal(node, 'cap').text})")


def _reshape(p: Printer, node: Node) -> Text:
    source = p.value(node.args[0])
    sizes: list[str] = []
    position = 0
    for size in node.shape:
        if size == TOKENS:
            sizes.append("-1")
            continue
        sizes.append(p.literal(node, "shape", position).text)
        position += 1
    return Text(f"{source.operand}.reshape(({', '.join(sizes)}{',' if len(sizes) == 1 else ''}))")


def _broadcast(p: Printer, node: Node) -> Text:
    source = p.value(node.args[0])
    sizes: list[str] = []
    position = 0
    for axis, size in enumerate(node.shape):
        if size == TOKENS:
            sizes.append(f"{source.operand}.shape[{axis}]")
            continue
        sizes.append(p.literal(node, "shape", position).text)
        position += 1
    p.body.imports.add(F_IMPORT)
    return Text(f"F.broadcast_to({source.text}, ({', '.join(sizes)}))")


def _permute(p: Printer, node: Node) -> Text:
    return Text(f"{p.value(node.args[0]).operand}.permute({node.attrs['axes']!r})")


def _split(p: Printer, node: Node) -> Text:
    source = p.value(node.args[0])
    count = len(node.attrs["sizes"])
    sizes = ", ".join(p.literal(node, "sizes", i).text for i in range(count))
    axis = node.attrs["axis"]
    last = axis == len(node.shape[0]) - 1
    return Text(f"{source.operand}.split([{sizes}], axis={-1 if last else axis})")


def _slice(p: Printer, node: Node) -> Text:
    source = p.value(node.args[0])
    start, stop, step = (p.literal(node, k).text for k in ("start", "stop", "step"))
    head = ":, " * node.attrs["axis"]
    stride = f":{step}" if step != "1" else ""
    return Text(f"{source.operand}[{head}{'' if start == '0' else start}:{stop}{stride}]")


def _select(p: Printer, node: Node) -> Text:
    source = p.value(node.args[0])
    return Text(f"{source.operand}[{':, ' * node.attrs['axis']}{p.literal(node, 'index').text}]")


def _cat(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    parts = ", ".join(p.value(a).text for a in node.args[0])
    return Text(f"F.concat([{parts}], axis={node.attrs['axis']})")


def _stack(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    parts = ", ".join(p.value(a).text for a in node.args[0])
    return Text(f"F.stack([{parts}], axis={node.attrs['axis']})")


def _cast(p: Printer, node: Node) -> Text:
    source = p.value(node.args[0])
    p.body.imports.add(F_IMPORT)
    return Text(f"F.cast({source.text}, {dtype_text(p, node.dtype)})")


def dtype_text(p: Printer, dtype: str) -> str:
    """A dtype in forward: bfloat16 stands for the dtype the port runs in."""
    if dtype == "bfloat16":
        return p.attribute("dtype", "config.dtype")
    p.body.imports.add(DTYPE_IMPORT)
    return f"DType.{dtype}"


def _pow(p: Printer, node: Node) -> Text:
    base, exponent = _operand(p, node, 0), _operand(p, node, 1)
    if exponent.text in ("2", "2.0") and base.text.replace("_", "").replace(".", "").isalnum():
        return Text(f"{base.operand} * {base.operand}", False)
    p.body.imports.add(F_IMPORT)
    return Text(f"F.pow({base.text}, {exponent.text})")


def _square(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    return Text(f"F.pow({p.value(node.args[0]).text}, 2)")


def _reduced(name: str) -> Callable[[Printer, Node], Text]:
    def printer(p: Printer, node: Node) -> Text:
        p.body.imports.add(F_IMPORT)
        text = p.value(node.args[0]).text
        for axis in node.attrs["axes"]:
            text = f"{name}({text}, axis={axis})"
        if not node.attrs["keep"]:
            for axis in reversed(node.attrs["axes"]):
                text = f"F.squeeze({text}, {axis})"
        return Text(text)

    return printer


def _softmax(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    return Text(f"F.softmax({p.value(node.args[0]).text}, axis={node.attrs['axis']})")


def _two(name: str) -> Callable[[Printer, Node], Text]:
    def printer(p: Printer, node: Node) -> Text:
        p.body.imports.add(F_IMPORT)
        a, b = _operand(p, node, 0), _operand(p, node, 1)
        return Text(f"{name}({a.text}, {b.text})")

    return printer


def _swapped(symbol: str) -> Callable[[Printer, Node], Text]:
    def printer(p: Printer, node: Node) -> Text:
        a, b = _operand(p, node, 0), _operand(p, node, 1)
        return Text(f"{b.operand} {symbol} {a.operand}", False)

    return printer


def _where(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    parts = ", ".join(_operand(p, node, i).text for i in range(3))
    return Text(f"F.where({parts})")


def _expm1(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    return Text(f"F.exp({p.value(node.args[0]).text}) - 1.0", False)


def _softplus(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    return Text(f"F.log(1.0 + F.exp({p.value(node.args[0]).text}))")


def _clamp(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    text = p.value(node.args[0]).text
    low = node.attrs.get("min", node.args[1] if len(node.args) > 1 else None)
    high = node.attrs.get("max", node.args[2] if len(node.args) > 2 else None)
    for bound, name, key, position in ((low, "F.max", "min", 1), (high, "F.min", "max", 2)):
        if bound is None:
            continue
        slot = key if key in node.attrs else f"arg{position}"
        text = f"{name}({text}, {p.literal(node, slot).text})"
    return Text(text)


def _embedding(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    table = node.attrs["weight"] if node.proof else node.args[0]
    ids = node.args[0] if node.proof else node.args[1]
    return Text(f"F.gather({p.value(table).text}, {p.value(ids).text}, axis=0)")


def _linear(p: Printer, node: Node) -> Text:
    source, weight = p.value(node.args[0]), node.attrs["weight"]
    text = f"{source.operand} @ {p.param(weight)}{'' if node.attrs['transposed'] else '.T'}"
    bias = node.attrs.get("bias")
    return Text(text if bias is None else f"{text} + {p.param(bias)}", False)


def _matmul(p: Printer, node: Node) -> Text:
    a, b = p.value(node.args[0]), p.value(node.args[1])
    return Text(f"{a.operand} @ {b.operand}", False)


def _rms_norm(p: Printer, node: Node) -> Text:
    source = p.value(node.args[0])
    eps = p.literal(node, "eps").text
    weight = node.attrs["weight"]
    if weight is None:
        p.body.helpers.add("unit_rms_norm")
        return Text(f"unit_rms_norm({source.text}, {eps})")
    p.body.imports.add("from max.experimental.nn.norm import rms_norm")
    extra = norm_arguments(node)
    return Text(f"rms_norm({source.text}, {p.param(weight)}, {eps}{extra})")


def norm_arguments(node: Node) -> str:
    """The keyword arguments of `rms_norm` that are not its defaults."""
    extra = f", weight_offset={float(node.attrs['offset'])}" if node.attrs["offset"] else ""
    return extra + (", multiply_before_cast=True" if node.attrs["multiply_before_cast"] else "")


def _rope_table(p: Printer, node: Node) -> Text:
    rope: Rope = node.attrs["rope"]
    p.body.helpers.add(f"{rope.kind}_frequencies")
    factor = ""
    if isinstance(rope.factor, tuple):
        name, *given = rope.factor
        p.body.helpers.add(name)
        factor = f", factor={name}({', '.join(p.number(v).text for v in given)})"
    elif isinstance(rope.factor, Expr) or rope.factor != 1.0:
        factor = f", factor={p.number(rope.factor).text}"
    length = p.attribute("max_seq_len", "config.max_seq_len")
    like = p.value(node.args[0]).text
    if rope.kind == "longrope":
        p.body.helpers.add("longrope_table")
        tables = ", ".join(_frequencies(p, rope, ("rope_theta", n)) for n in _LONGROPE)
        return Text(f"longrope_table({tables}, {length}, {like}{factor})")
    p.body.helpers.add("rope_table")
    frequencies = _frequencies(p, rope, [name for name, _ in rope.arguments])
    return Text(f"rope_table({frequencies}, {length}, {like}{factor})")


#: LongRoPE's two sets of factors: up to the trained length, and beyond it.
_LONGROPE = ("short_factor", "long_factor")


def _frequencies(p: Printer, rope: Rope, names: Sequence[str]) -> str:
    given = dict(rope.arguments)
    arguments = [rope.width, *(given[name] for name in names)]
    sign = "-" if rope.sign < 0 else ""
    return f"{sign}{rope.kind}_frequencies({', '.join(p.number(v).text for v in arguments)})"


def _rope(p: Printer, node: Node) -> Text:
    rope: Rope = node.attrs["rotation"]
    found = p.entry.literals.get(p.slots[(node.name, "rotation", 0)], {0: rope})
    cases = [r for r in found.values() if isinstance(r, Rope)]
    spans = {(str(r.width), str(r.offset)) for r in cases}
    whole = all(str(n.attrs["rotation"].width) == str(n.shape[-1]) for n in _twins_of(p, node))
    if len({r.interleaved for r in cases}) != 1 or (len(spans) != 1 and not whole):
        raise MaxportError(
            "layers that share a class rotate different columns",
            where=f"{node.scope}, {node.line}",
            fix="report the model",
        )
    source, table, kv, offsets = (p.value(a) for a in node.args)
    common = f"{source.text}, {table.text}, {kv.text}, {offsets.text}"
    if rope.kind == "longrope":
        p.body.helpers.add("rotate_long")
        original = p.number(dict(rope.arguments)["original_max_position_embeddings"]).text
        start, span = p.number(rope.offset).text, p.number(rope.width).text
        return Text(
            f"rotate_long({common}, original={original}, start={start}, width={span}, "
            f"interleaved={rope.interleaved})"
        )
    if whole:
        p.body.helpers.add("rotate")
        return Text(f"rotate({common}, interleaved={rope.interleaved})")
    p.body.helpers.add("rotate_columns")
    start, span = p.number(rope.offset).text, p.number(rope.width).text
    return Text(
        f"rotate_columns({common}, start={start}, width={span}, interleaved={rope.interleaved})"
    )


def _twins_of(p: Printer, node: Node) -> list[Node]:
    """The same operation in every module that shares the class."""
    index = p.instance.items.index(node)
    return [i for e in p.entry.instances if isinstance(i := e.items[index], Node)]


_MASKS = {
    "bidirectional": "NULL_MASK",
    "causal": "CAUSAL_MASK",
    "chunked": "CHUNKED_CAUSAL_MASK",
    "sliding": "SLIDING_WINDOW_CAUSAL_MASK",
}


def _attend(p: Printer, node: Node) -> Text:
    values = [p.value(a).text for a in node.args if isinstance(a, Ref)]
    kv_params = p.attribute("kv_params", "config.kv_params")
    layer = p.attribute("layer", "layer")
    p.body.uses_layer = True
    arguments = [*values, kv_params, layer, f"scale={p.literal(node, 'scale').text}"]
    if node.attrs["softcap"] or "slopes" in node.attrs:
        return _attend_scores(p, node, arguments)
    name = "attend_padded" if node.attrs["padded"] else "attend"
    p.body.helpers.add(name)
    arguments += _mask_arguments(p, node)
    return Text(f"{name}({', '.join(arguments)})")


def _mask_arguments(p: Printer, node: Node) -> list[str]:
    index = p.slots[(node.name, "mask", 0)]
    if index in p.entry.literals:
        p.body.imports.add("from max.nn.attention import MHAMaskVariant")
        cases = p.entry.literals[index]
        pairs = ", ".join(f"{k!r}: MHAMaskVariant.{_MASKS[str(v)]}" for k, v in cases.items())
        p.body.uses_kind = True
        mask = p.attribute("mask", f"{{{pairs}}}[kind]")
        return [f"mask={mask}", f"window={p.literal(node, 'window').text}"]
    kind = node.attrs["mask"]
    if kind == "causal":
        return []
    p.body.imports.add("from max.nn.attention import MHAMaskVariant")
    out = [f"mask=MHAMaskVariant.{_MASKS[kind]}"]
    return out if kind == "bidirectional" else [*out, f"window={p.literal(node, 'window').text}"]


def _attend_scores(p: Printer, node: Node, arguments: list[str]) -> Text:
    masks = {
        node.attrs["mask"],
        *p.entry.literals.get(p.slots[(node.name, "mask", 0)], {}).values(),
    }
    if masks - {"causal", "sliding"}:
        raise MaxportError(
            f"soft-capped or biased attention with a {node.attrs['mask']} mask has no lowering",
            where=f"{node.scope}, {node.line}",
            fix="port this layer by hand",
        )
    p.body.helpers.add("attend_scores")
    if "sliding" in masks:
        arguments.append(f"window={p.literal(node, 'window').text}")
    if node.attrs["softcap"]:
        arguments.append(f"softcap={p.literal(node, 'softcap').text}")
    slopes = node.attrs.get("slopes")
    if isinstance(slopes, Slopes):
        p.body.helpers.add("alibi_slopes")
        heads, bias = p.number(slopes.heads).text, p.number(slopes.bias_max).text
        arguments.append(f"slopes=alibi_slopes({heads}, {bias})")
    return Text(f"attend_scores({', '.join(arguments)})")


def _index(p: Printer, node: Node) -> Text:
    p.body.imports.add(F_IMPORT)
    source, ids = p.value(node.args[0]), p.value(node.args[1])
    return Text(f"F.gather({source.text}, {ids.text}, axis={node.attrs['axis']})")


def _layer_norm(p: Printer, node: Node) -> Text:
    raise MaxportError(
        "a LayerNorm whose weights lie outside its module has no lowering",
        where=f"{node.scope}, {node.line}",
        fix="port this layer by hand",
    )


def _sinusoids(p: Printer, node: Node) -> Text:
    p.body.helpers.add("sinusoids")
    positions = p.value(node.args[0])
    width, steps = p.literal(node, "width").text, p.literal(node, "steps").text
    dtype = p.attribute("dtype", "config.dtype")
    zero = f", zero_row={p.literal(node, 'zero_row').text}" if "zero_row" in node.attrs else ""
    return Text(f"sinusoids({positions.text}, {width}, steps={steps}, dtype={dtype}{zero})")


Printers = dict[str, Callable[[Any, Node], Text]]
_PRINTERS: Printers = {
    "activation": _activation,
    "amax": _reduced("F.max"),
    "attend": _attend,
    "broadcast_to": _broadcast,
    "cast": _cast,
    "cat": _cat,
    "clamp": _clamp,
    "embedding": _embedding,
    "expm1": _expm1,
    "index": _index,
    "layer_norm": _layer_norm,
    "le": _swapped(">="),
    "linear": _linear,
    "lt": _swapped(">"),
    "matmul": _matmul,
    "max": _two("F.max"),
    "maximum": _two("F.max"),
    "mean": _reduced("F.mean"),
    "min": _two("F.min"),
    "minimum": _two("F.min"),
    "multiplier": _multiplier,
    "permute": _permute,
    "pow": _pow,
    "reshape": _reshape,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "rope_table": _rope_table,
    "rsub": _swapped("-"),
    "select": _select,
    "sinusoids": _sinusoids,
    "slice": _slice,
    "softcap": _softcap,
    "softmax": _softmax,
    "softplus": _softplus,
    "split": _split,
    "square": _square,
    "stack": _stack,
    "sum": _reduced("F.sum"),
    "where": _where,
}
