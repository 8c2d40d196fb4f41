"""The port's top class: inputs as MAX's pipelines give them, logits in every ReturnLogits mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxport.emit.forward import Body, Printer, attribute_path
from maxport.emit.tree import Call, Instance, Item, Loop
from maxport.errors import MaxportError
from maxport.ir import Node, Ref

if TYPE_CHECKING:
    from maxport.emit.graphfile import _Emitter


@dataclass
class TopClass:
    """Source of the top class; the head's and the embedding's weight where they can be one."""

    source: str
    head: tuple[str, str] | None
    tied: bool
    bias: tuple[str, str] | None = None


def _split(root: Instance) -> tuple[list[Item], list[Item], Ref]:
    """(trunk, head, hidden states): the head is what follows the last call that runs layers."""
    last = 0
    for index, item in enumerate(root.items):
        deep = isinstance(item, Call) and item.child.leaf is None
        if isinstance(item, Loop) or deep:
            last = index + 1
    trunk, head = root.items[:last], root.items[last:]
    while head and not _starts_head(head[0]):
        trunk.append(head.pop(0))
    own = {r for item in head for r in _results(item)}
    reads = [r for item in head for r in _inputs(item) if r not in own]
    outside = list(dict.fromkeys(reads))
    if len(outside) != 1:
        raise MaxportError(
            f"the head reads {len(outside)} values of the model instead of its last hidden states",
            fix="port this model by hand",
        )
    return trunk, head, outside[0]


def _starts_head(item: Item) -> bool:
    """Norms in front of the head belong to the trunk: they run once for all logits."""
    return not (
        isinstance(item, Call) and item.child.leaf is not None and "norm" in item.child.leaf.op
    )


def _results(item: Item) -> list[Ref]:
    return [Ref(item.name)] if isinstance(item, Node) else list(item.outputs)


def _inputs(item: Item) -> list[Ref]:
    if isinstance(item, Node):
        return item.refs()
    return list(item.inputs if isinstance(item, Call) else item.calls[0].inputs)


def _head_linear(head: list[Item]) -> tuple[Node, str] | None:
    """The projection to logits and the module's name."""
    for item in head:
        node = (
            item.child.leaf if isinstance(item, Call) else item if isinstance(item, Node) else None
        )
        if node is not None and node.op == "linear":
            name = item.child.name if isinstance(item, Call) else node.home or "lm_head"
            return node, name
    return None


def _embedding(root: Instance) -> Node | None:
    """The token embedding."""
    for node in root.nodes():
        if node.op == "embedding" and node.args[0] == Ref("tokens"):
            return node
    return None


def render_root(emitter: _Emitter, root: Instance, *, tie_field: bool) -> TopClass:
    """Write the class that MAX compiles.

    Raises:
        MaxportError: The head reads more than the last hidden states.
    """
    entry = emitter.classes.of(root)
    trunk, head, hidden = _split(root)
    found, embedding = _head_linear(head), _embedding(root)
    embed_weight = embedding.attrs["weight"].fqn if embedding is not None else ""
    tied = found is not None and found[0].attrs["weight"].fqn == embed_weight
    alike = (
        found is not None
        and embedding is not None
        and str(found[0].attrs["weight"].shape) == str(embedding.attrs["weight"].shape)
    )
    can_tie = bool(tied or (tie_field and alike and found[0].attrs["bias"] is None))  # type: ignore[index]
    trunk_body = _print_trunk(emitter, entry, trunk, hidden)
    lines = emitter._children(_only(entry, trunk), trunk_body)
    head_lines, head_body = _print_head(emitter, entry, head, hidden, found, embed_weight, can_tie)
    lines += head_lines
    lines += [
        line
        for line in emitter._own_params(root)
        if found is None or not can_tie or "bias" not in line
    ]
    for body in (trunk_body, head_body):
        emitter._collect(body)
        lines += [
            f"self.{a.name} = {a.init}" for a in body.attributes.values() if a.name != "kv_params"
        ]
    emitter.helpers.add("last_n_rows")
    emitter.imports |= {
        "from max import tree",
        "from max.dtype import DType",
        "from max.experimental import functional as F",
        "from max.experimental.nn import Module",
        "from max.nn.kv_cache import KVCacheInputsPerDevice",
        "from max.nn.transformer import ReturnLogits",
        "from max.pipelines.lib import ModuleV3Outputs",
    }
    uses_positions = _uses(trunk, "positions")
    if uses_positions:
        emitter.helpers.add("request_and_positions")
    source = _source(
        emitter, entry.name, entry.hf_class, lines, trunk_body, head_body, uses_positions
    )
    pair = None
    if found is not None and can_tie:
        pair = (f"{found[1]}.weight", embed_weight)
    bias = None
    if found is not None and can_tie and found[0].attrs["bias"] is not None:
        bias = (found[0].attrs["bias"].fqn, f"{found[1].replace('.', '_')}_bias")
    return TopClass(source, pair, tied, bias)


def _uses(items: list[Item], name: str) -> bool:
    return any(r.name == name for item in items for r in _inputs(item))


def _only(entry: Any, items: list[Item]) -> Any:
    """The class with only some of its body's items, to make their children."""
    from dataclasses import replace

    body = replace(entry.body, items=items)
    return replace(entry, instances=[body])


def _print_trunk(emitter: _Emitter, entry: Any, trunk: list[Item], hidden: Ref) -> Body:
    printer = Printer(entry, emitter.classes)
    return printer.run(trunk, [hidden])


def _print_head(
    emitter: _Emitter,
    entry: Any,
    head: list[Item],
    hidden: Ref,
    found: tuple[Node, str] | None,
    embed_weight: str,
    can_tie: bool,
) -> tuple[list[str], Body]:
    """Lines of `__init__` for the head, and the body of `logits`."""
    printer = Printer(entry, emitter.classes)
    printer.values[hidden] = _text("x")
    if not can_tie or found is None:
        lines = emitter._children(_only(entry, head), Body())
        body = printer.run(head, [emitter.root.outputs[0]])
        return lines, body
    node, name = found
    module = name.replace(".", "_")
    path = attribute_path(embed_weight)
    shape = node.attrs["weight"].shape
    emitter.fields.setdefault("tie_word_embeddings")
    emitter.imports.add("from max.experimental.nn import Linear")
    lines = [
        f"self.{module} = (None if config.tie_word_embeddings else "
        f"Linear(in_dim={emitter.size(shape[1])}, out_dim={emitter.size(shape[0])}, bias=False))"
    ]
    bias = node.attrs["bias"]
    plus = "" if bias is None else f" + self.{module}_bias"
    if bias is not None:
        lines.append(f"self.{module}_bias = Tensor.zeros([{emitter.size(bias.shape[0])}])")
    printer.values[Ref(node.name)] = _text(f"x @ head.T{plus}", False)
    before, after = _around(head, node)
    body = printer.body
    if before:
        inner = Printer(entry, emitter.classes)
        inner.values[hidden] = _text("x")
        source = node.args[0]
        first = inner.run(before, [source])
        body.lines += first.lines
        body.attributes.update(first.attributes)
        body.helpers |= first.helpers
        body.imports |= first.imports
        printer.values[Ref(node.name)] = _text(f"{_operand(first.result)} @ head.T{plus}", False)
    body.lines.append(f"head = self.{path} if self.{module} is None else self.{module}.weight")
    printer.run(after, [emitter.root.outputs[0]])
    return lines, body


def _operand(text: str) -> str:
    return text if text.replace("_", "").replace(".", "").isalnum() else f"({text})"


def _text(text: str, atom: bool = True) -> Any:
    from maxport.emit.ops import Text

    return Text(text, atom)


def _item_of(head: list[Item], node: Node) -> Item | None:
    for item in head:
        leaf = item.child.leaf if isinstance(item, Call) else item
        if leaf is node:
            return item
    return None


def _around(head: list[Item], node: Node) -> tuple[list[Item], list[Item]]:
    item = _item_of(head, node)
    index = head.index(item) if item is not None else 0
    return head[:index], head[index + 1 :]


def _source(
    emitter: _Emitter,
    name: str,
    hf_class: str,
    lines: list[str],
    trunk: Body,
    head: Body,
    uses_positions: bool,
) -> str:
    from maxport.emit.graphfile import class_docstring

    code = "\n".join(f"        {line}" for line in lines)
    logits = "\n".join(f"        {line}" for line in head.lines)
    result = f"F.cast({head.result}, DType.float32)"
    body = list(trunk.lines)
    hidden = trunk.result
    body.append(f"hidden = {hidden}" if hidden != "hidden" else "")
    forward = "\n".join(f"        {line}" for line in body if line)
    positions = (
        "        _, positions = request_and_positions(row_offsets, kv, tokens.shape[0])\n"
        if uses_positions
        else ""
    )
    doc = class_docstring(
        "Logits of each request's last token, and of more tokens where the pipeline asks for "
        f"them{emitter.origin(hf_class)}."
    )
    return f'''class {name}(Module[..., ModuleV3Outputs]):
    {doc}

    def __init__(self, config: {emitter.config_class}) -> None:
        super().__init__()
{code}
        self.kv_params = config.kv_params
        self.return_logits = config.return_logits

    def logits(self, x: Tensor) -> Tensor:
        """Float32 logits, shape (rows, vocabulary), of hidden states (rows, width)."""
{logits}
        return {result}

    def forward(
        self, tokens: Tensor, return_n_logits: Tensor, row_offsets: Tensor, *kv_inputs: Tensor
    ) -> ModuleV3Outputs:
        kv_tree = self.kv_params.unflatten_kv_inputs(iter(x._graph_value for x in kv_inputs))
        (kv,) = tree.leaves(kv_tree, leaf=KVCacheInputsPerDevice)
{positions}{forward}
        last = self.logits(F.gather(hidden, row_offsets[1:] - 1, axis=0))
        match self.return_logits:
            case ReturnLogits.LAST_TOKEN:
                return ModuleV3Outputs(next_token_logits=last)
            case ReturnLogits.ALL:
                return ModuleV3Outputs(
                    next_token_logits=last, logits=self.logits(hidden), logit_offsets=row_offsets
                )
            case ReturnLogits.VARIABLE:
                rows, offsets = last_n_rows(row_offsets, return_n_logits)
                return ModuleV3Outputs(
                    next_token_logits=last,
                    logits=self.logits(F.gather(hidden, rows, axis=0)),
                    logit_offsets=offsets,
                )
'''
