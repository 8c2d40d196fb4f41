"""Cut a layer's graph into slots: what each residual branch computes, in a canonical order.

A slot is a list of tokens, one for each operation that computes something. Rearrangements of values
(reshapes, transposes, splits) leave no token; that a projection is fused shows as an attribute of
its token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from maxport.ir import Graph, Node, Param, Ref, walk_values

MOVES = {
    "alias", "cat", "chunk", "clone", "contiguous", "detach", "expand", "flatten", "permute",
    "repeat", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack",
    "transpose", "unbind", "unsqueeze", "view", "cast", "constant_pad_nd", "lift_fresh_copy",
}  # fmt: skip
NORMS = {"rms_norm", "layer_norm"}
#: Arithmetic on elements, which no idiom took.
PLAIN = {
    "abs", "add", "ceil", "clamp", "cos", "div", "eq", "exp", "expm1", "floor", "ge", "gt", "le",
    "log", "log1p", "lt", "max", "maximum", "min", "minimum", "mul", "neg", "pow", "reciprocal",
    "residual", "rsqrt", "sigmoid", "sin", "softplus", "sqrt", "sub", "tanh", "where",
}  # fmt: skip
#: Fewer of them stay single tokens.
_FORMULA = 3
_SPLITS = {"chunk", "select", "slice", "split", "split_with_sizes", "unbind"}
_STREAM = NORMS | MOVES | {"multiplier", "mul", "div"}


@dataclass(frozen=True)
class Token:
    """One operation without its sizes: what it is, and where the model's code computes it."""

    op: str
    attrs: tuple[tuple[str, object], ...] = ()
    place: str = field(default="", compare=False)

    def get(self, name: str) -> object:
        """An attribute's value, None if the token has none of that name."""
        return dict(self.attrs).get(name)


@dataclass
class Branch:
    """One term of a residual sum: its nodes, the value it reads and the value it is added to."""

    total: str
    nodes: list[Node]
    reads: str
    adds: str


class Layer:
    """A layer's nodes with the helpers that read them."""

    def __init__(self, nodes: Sequence[Node], graph: Graph) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.all = graph.by_name()
        self.users = graph.users()
        self.sums: dict[str, list[str]] = {}
        self._find_sums()

    def inner(self, node: Node) -> list[str]:
        """Names of the values of this layer that a node reads, in argument order."""
        return [r.name for r in node.refs() if r.name in self.nodes]

    def _find_sums(self) -> None:
        """Residual sums with nested ones flattened: `x + (a + b)` is one sum of three terms."""
        residuals = [n for n in self.nodes.values() if n.op == "residual"]
        width = residuals[-1].shape if residuals else None
        terms: dict[str, list[str]] = {}
        for node in residuals:
            if node.shape != width:
                continue
            found: list[str] = []
            for ref in node.refs():
                single = len(self.users.get(ref.name, [])) == 1
                found += terms.pop(ref.name) if single and ref.name in terms else [ref.name]
            terms[node.name] = found
        for name, parts in terms.items():
            if any(self.is_stream(part) for part in parts):
                self.sums[name] = parts

    def is_stream(self, name: str) -> bool:
        """Whether a value is the hidden state itself, at most normalised or scaled."""
        while name in self.nodes and name not in self.sums:
            node = self.nodes[name]
            refs = node.refs()
            if node.op not in _STREAM or not refs:
                return False
            name = refs[0].name
        return True

    def source(self, name: str) -> str:
        """The stream value below a normalised or scaled one."""
        while name in self.nodes and name not in self.sums:
            name = self.nodes[name].refs()[0].name
        return name

    def above(self, end: str, stop: Iterable[str] = ()) -> list[Node]:
        """Nodes that `end` is computed from, down to residual sums, in canonical order."""
        order: list[Node] = []
        seen = set(stop)

        def visit(name: str) -> None:
            if name in seen or name not in self.nodes or name in self.sums:
                return
            seen.add(name)
            for child in self._sorted(self.nodes[name]):
                visit(child)
            order.append(self.nodes[name])

        visit(end)
        return order

    def _sorted(self, node: Node) -> list[str]:
        names = self.inner(node)
        if node.op in ("gate", "residual", "add", "mul"):
            return sorted(names, key=lambda n: self.signature(n))
        return names

    def signature(self, name: str, depth: int = 6) -> str:
        """A value's operations as text, so that commuting operands have one order."""
        if name not in self.nodes or name in self.sums or depth == 0:
            return "."
        node = self.nodes[name]
        below = [self.signature(n, depth - 1) for n in self.inner(node)]
        if node.op in MOVES:
            return below[0] if below else "."
        return f"{node.op}({','.join(sorted(below))})"


def layer_slots(nodes: Sequence[Node], graph: Graph) -> dict[str, tuple[Token, ...]]:
    """The slots of one layer: for every residual branch its wiring and what it computes."""
    layer = Layer(nodes, graph)
    branches = _branches(layer)
    if not branches:
        return {"body": _tokens(layer, list(layer.nodes.values()))}
    slots: dict[str, tuple[Token, ...]] = {}
    streams = {name: f"sum {i + 1}" for i, name in enumerate(layer.sums)}
    covered: set[str] = set(layer.sums)
    norms: dict[str, str] = {}
    for branch in branches:
        label = _unused(_label(branch), slots)
        wiring = (
            ("reads", streams.get(branch.reads, "the layer's input")),
            ("adds to", streams.get(branch.adds, "the layer's input")),
        )
        slots[f"{label} wiring"] = (Token("branch", wiring, _place(layer.nodes[branch.total])),)
        slots |= _branch_slots(layer, branch, label, norms)
        covered |= {node.name for node in branch.nodes}
    rest = [n for n in layer.nodes.values() if n.name not in covered and n.op != "residual"]
    if tokens := _tokens(layer, rest):
        slots["stream"] = tokens
    return slots


def _branches(layer: Layer) -> list[Branch]:
    found: list[Branch] = []
    for total, parts in layer.sums.items():
        base = next((p for p in parts if layer.is_stream(p)), "")
        for part in parts:
            if layer.is_stream(part):
                continue
            nodes = layer.above(part)
            reads = next(
                (
                    layer.source(ref.name)
                    for node in nodes
                    for ref in node.refs()
                    if ref.name in layer.sums or layer.all[ref.name].shape == nodes[-1].shape
                    if ref.name not in {n.name for n in nodes}
                ),
                "",
            )
            found.append(Branch(total, nodes, reads, layer.source(base)))
    return found


def _label(branch: Branch) -> str:
    ops = {node.op for node in branch.nodes}
    if "attend" in ops:
        return "attention"
    if ops & {"topk", "sort"}:
        return "experts"
    if ops & {"conv1d", "convolution", "cumsum"}:
        return "mixer"
    return "mlp"


def _unused(label: str, slots: dict[str, tuple[Token, ...]]) -> str:
    name, number = label, 2
    while f"{name} wiring" in slots:
        name, number = f"{label} {number}", number + 1
    return name


def _branch_slots(
    layer: Layer, branch: Branch, label: str, norms: dict[str, str]
) -> dict[str, tuple[Token, ...]]:
    """A branch's slots; `norms` says which branch each norm was seen in first."""
    slots: dict[str, tuple[Token, ...]] = {}
    nodes = [n for n in branch.nodes if n.op not in MOVES]
    before = [n for n in nodes if n.op in NORMS and layer.is_stream(n.name)]
    nodes = [n for n in nodes if n not in before]
    after: list[Node] = []
    while nodes and nodes[-1].op in NORMS | {"multiplier"}:
        after.insert(0, nodes.pop())
    own = [n for n in before if norms.setdefault(n.name, label) == label]
    shared = [Token("shared norm", (("of", norms[n.name]),), _place(n)) for n in before]
    slots[f"{label} norm before"] = _tokens(layer, own) if own == before else tuple(shared)
    slots[f"{label} norm after"] = _tokens(layer, after)
    attends = [n for n in nodes if n.op == "attend"]
    if len(attends) == 1:
        slots |= _attention_slots(layer, attends[0], nodes, label)
    else:
        slots[f"{label} body"] = _tokens(layer, nodes)
    return {name: tokens for name, tokens in slots.items() if tokens}


def _attention_slots(
    layer: Layer, attend: Node, nodes: list[Node], label: str
) -> dict[str, tuple[Token, ...]]:
    slots: dict[str, tuple[Token, ...]] = {}
    inside = {n.name for n in nodes}
    covered: set[str] = {attend.name}
    for role, arg in zip(("query", "key", "value"), attend.args, strict=False):
        chain = layer.above(arg.name) if isinstance(arg, Ref) else []
        kept = [n for n in chain if n.name in inside]
        slots[f"{label} {role}"] = _tokens(layer, kept, heads=True)
        covered |= {n.name for n in kept}
    slots[f"{label} scores"] = (_attend(attend, layer),)
    slots[f"{label} output"] = _tokens(layer, [n for n in nodes if n.name not in covered])
    return slots


def _attend(node: Node, layer: Layer) -> Token:
    q, k = (layer.all[a.name] for a in node.args[:2])
    scale = node.attrs.get("scale", 0.0)
    width = q.shape[-1] if isinstance(q.shape, tuple) and isinstance(q.shape[-1], int) else 0
    plain = bool(width) and abs(scale - width**-0.5) < 1e-6
    attrs = [
        ("mask", node.attrs.get("mask")),
        ("scale", "head_dim**-0.5" if plain else "other"),
        ("softcap", bool(node.attrs.get("softcap"))),
        ("sinks", "sinks" in node.attrs),
        ("ALiBi", bool(node.attrs.get("slopes"))),
        ("grouped", _heads(q) != _heads(k)),
    ]
    return Token("attend", tuple((k, v) for k, v in attrs if v not in (False, None)), _place(node))


def _heads(node: Node) -> int:
    """Number of heads of a (batch, heads, tokens, head_dim) value in any layout."""
    sizes = [s for s in node.shape if isinstance(s, int)]
    return sizes[0] if len(sizes) > 1 else 0


def _tokens(layer: Layer, nodes: Iterable[Node], heads: bool = False) -> tuple[Token, ...]:
    """One token for each node; the plain arithmetic of one module is one token, at its last."""
    counted = [n for n in nodes if n.op not in MOVES and n.op != "mask"]
    plain: dict[str, list[Node]] = {}
    for node in counted:
        if node.op in PLAIN and node.scope:
            plain.setdefault(node.scope, []).append(node)
    formulas = {row[-1].name: row for row in plain.values() if len(row) >= _FORMULA}
    inside = {node.name for row in formulas.values() for node in row}
    tokens: list[Token] = []
    for node in counted:
        if row := formulas.get(node.name, []):
            ops = ", ".join(sorted(n.op for n in row))
            tokens.append(Token("formula", (("of", ops),), _place(node)))
        elif node.name not in inside:
            tokens.append(_token(node, layer, heads))
    return tuple(tokens)


def _token(node: Node, layer: Layer, heads: bool) -> Token:
    attrs: list[tuple[str, object]] = []
    given = node.attrs
    if node.op == "linear":
        attrs = [("bias", given.get("bias") is not None), ("fused", _is_split(node, layer))]
        attrs += [("stored transposed", bool(given.get("transposed")))]
    elif node.op in NORMS:
        attrs = [("weight", isinstance(given.get("weight"), Param))]
        attrs += [("weight + 1", bool(given.get("offset"))), ("bias", _has(given.get("bias")))]
        attrs += [("rounds before the weight", given.get("multiply_before_cast") is False)]
        if heads:
            wide = sum(isinstance(s, int) for s in node.shape) < 2
            attrs += [("over", "all heads" if wide else "each head")]
    elif node.op == "rope":
        attrs = _rope(node)
    elif node.op == "activation":
        attrs = [("kind", given.get("kind"))]
    elif node.op == "embedding":
        ids = node.args[0] if node.args else None
        positional = isinstance(ids, Ref) and _depends_only_on_positions(ids.name, layer)
        attrs = [("of", "positions" if positional else "tokens")]
    return Token(node.op, tuple((k, v) for k, v in attrs if v is not False), _place(node))


def _has(value: object) -> bool:
    return value is not None


def _rope(node: Node) -> list[tuple[str, object]]:
    rotation = node.attrs["rotation"]
    width = node.shape[-1] if isinstance(node.shape[-1], int) else rotation.width
    steps = [b / a for a, b in zip(rotation.freqs, rotation.freqs[1:], strict=False) if a]
    even = not steps or max(steps) - min(steps) < 1e-4 * max(steps)
    return [
        ("pairs", "adjacent" if rotation.interleaved else "halves"),
        ("partial", rotation.width != width),
        ("backwards", rotation.sign < 0),
        ("scaled", not even or abs(rotation.factor - 1.0) > 1e-6),
        ("in float32", bool(node.attrs.get("float32"))),
        ("frequencies by kind of layer", bool(node.attrs.get("several"))),
    ]


def _is_split(node: Node, layer: Layer) -> bool:
    stack = list(layer.users.get(node.name, []))
    while stack:
        user = stack.pop()
        if user.op in _SPLITS:
            return True
        if user.op in ("reshape", "transpose", "permute", "cast"):
            stack += layer.users.get(user.name, [])
    return False


def _depends_only_on_positions(name: str, layer: Layer) -> bool:
    stack, seen = [name], set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        node = layer.all[current]
        if node.op == "input" and current != "positions":
            return False
        stack += [r.name for r in node.refs()]
    return True


def _place(node: Node) -> str:
    """`Class file.py:line` of the innermost module that computes a node."""
    owner = node.classes.get(node.scope, "")
    if not owner and node.classes:
        owner = list(node.classes.values())[-1]
    return f"{owner.rsplit('.', 1)[-1]} {node.line}".strip()


def outer_slots(graph: Graph, inside: set[str]) -> dict[str, tuple[Token, ...]]:
    """Embedding and head: what is computed before the first and after the last layer."""
    outside = [n for n in graph.nodes if n.name not in inside and n.op not in ("input", "mask")]
    layer = Layer(graph.nodes, graph)
    after = _reached(graph, inside)
    into = {ref.name for node in graph.nodes if node.name in inside for ref in node.refs()}
    before = _ancestors(graph, into - inside)
    tables = [n for n in outside if n.name in before and not _is_token(n, layer)]
    names = {n.name for n in tables}
    embedding = [n for n in outside if n.name in before and n.name not in names]
    head = [n for n in outside if n.name in after]
    slots = {"embedding": _tokens(layer, embedding), "head": _tokens(layer, head)}
    tied = _tied(graph)
    if tied and slots["head"]:
        slots["tied"] = (Token("tied head"),)
    return {name: tokens for name, tokens in slots.items() if tokens}


def _is_token(node: Node, layer: Layer) -> bool:
    """Whether a value belongs to the hidden state: it depends on tokens, or embeds positions."""
    return node.op == "embedding" or not _depends_only_on_positions(node.name, layer)


def _reached(graph: Graph, inside: set[str]) -> set[str]:
    reached = set(inside)
    for node in graph.nodes:
        if any(r.name in reached for r in node.refs()):
            reached.add(node.name)
    return reached - inside


def _ancestors(graph: Graph, names: set[str]) -> set[str]:
    nodes, stack, seen = graph.by_name(), list(names), set[str]()
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            stack += [r.name for r in nodes[name].refs()]
    return seen


def _tied(graph: Graph) -> bool:
    tables = {
        value.fqn
        for node in graph.nodes
        if node.op == "embedding"
        for value in walk_values(node.attrs)
        if isinstance(value, Param)
    }
    for node in reversed(graph.nodes):
        if node.op == "linear":
            weight = node.attrs.get("weight")
            return isinstance(weight, Param) and weight.fqn in tables
    return False
