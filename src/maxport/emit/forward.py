"""The body of one emitted `forward`: expressions inlined where that reads well, values named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxport.emit.classes import ClassMap, PortClass, leaves, literal_slots
from maxport.emit.expr import Expr
from maxport.emit.ops import BINARY, Text, print_op
from maxport.emit.tree import CONTEXT, Call, Instance, Item, Loop
from maxport.ir import Node, Param, Ref

#: Longest expression that is written inside another instead of getting a name.
INLINE = 72


@dataclass
class Attribute:
    """One attribute that `__init__` sets for `forward`."""

    name: str
    init: str


@dataclass
class Body:
    """What printing a forward collected.

    Attributes:
        lines: Statements.
        result: Text of the value returned.
        attributes: Attributes that `__init__` must set.
        helpers: Functions used from `functional.py`.
        imports: Names used from `max`, as import lines.
        fields: Configuration fields read.
        by_kind: Local variables of `__init__` that depend on the layer's kind: text by kind.
        uses_kind: Whether `__init__` needs the layer's kind.
        uses_layer: Whether it needs the layer's index.
    """

    lines: list[str] = field(default_factory=list)
    result: str = ""
    attributes: dict[str, Attribute] = field(default_factory=dict)
    helpers: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    by_kind: dict[str, dict[Any, str]] = field(default_factory=dict)
    uses_kind: bool = False
    uses_layer: bool = False

    def choose(self, cases: Mapping[Any, str]) -> str:
        """Text in `__init__` of what is `cases[kind]`, with as little of it by kind as possible."""
        self.uses_kind = True
        columns = split_by_kind(cases)
        if columns is None:
            pairs = ", ".join(f"{k!r}: {t}" for k, t in cases.items())
            return f"{{{pairs}}}[kind]"
        text = ""
        for column in columns:
            same = set(column.values())
            text += same.pop() if len(same) == 1 else self._local(column)
        return text

    def _local(self, column: dict[Any, str]) -> str:
        name = _shared_name([t.removeprefix("config.") for t in column.values()])
        while self.by_kind.setdefault(name, column) != column:
            name += "_"
        return name

    def locals(self) -> list[str]:
        """The lines of `__init__` that set the locals."""
        texts = {
            name: ", ".join(f"{k!r}: {t}" for k, t in column.items())
            for name, column in self.by_kind.items()
        }
        return [f"{name} = {{{pairs}}}[kind]" for name, pairs in texts.items()]


def split_by_kind(cases: Mapping[Any, str]) -> list[dict[Any, str]] | None:
    """The texts cut into pieces of which only configuration fields differ; None if more differs."""
    pieces = {k: re.split(r"(config\.\w+)", t) for k, t in cases.items()}
    if len({len(p) for p in pieces.values()}) != 1:
        return None
    rows = zip(*pieces.values(), strict=True)
    columns = [dict(zip(pieces, row, strict=True)) for row in rows]
    words = [set(c.values()) for c in columns[0::2]]
    return columns if all(len(w) == 1 for w in words) else None


def _shared_name(names: Sequence[str]) -> str:
    """The words that several fields end in: `head_dim` for head_dim and global_head_dim."""
    words = [n.split("_")[::-1] for n in names]
    shared: list[str] = []
    for group in zip(*words, strict=False):
        if len(set(group)) != 1:
            break
        shared.insert(0, group[0])
    return "_".join(shared) or names[0]


def input_names(instance: Instance) -> dict[Ref, str]:
    """Argument names of a module's forward, in order."""
    names: dict[Ref, str] = {}
    tables = [r for r in instance.inputs if r.name.startswith("rope_table_")]
    plain = [r for r in instance.inputs if r.name not in CONTEXT and r not in tables]
    for index, ref in enumerate(plain):
        names[ref] = ("x", "y", "z", "u", "v", "w")[index] if len(plain) <= 6 else f"x{index + 1}"
    for index, ref in enumerate(tables):
        names[ref] = "freqs_cis" if len(tables) == 1 else f"freqs_cis_{index + 1}"
    for ref in instance.inputs:
        if ref.name in CONTEXT:
            names[ref] = ref.name
    return {ref: names[ref] for ref in instance.inputs}


class Printer:
    """Prints the items of one class's representative module."""

    def __init__(self, entry: PortClass, classes: ClassMap) -> None:
        self.entry, self.classes, self.body = entry, classes, Body()
        self.instance = entry.body
        self.values: dict[Ref, Text] = {r: Text(n) for r, n in input_names(self.instance).items()}
        self.names: dict[str, Ref | None] = {n: r for r, n in input_names(self.instance).items()}
        self.left: Counter[Ref] = Counter()
        self.hints: dict[Ref, str] = {}
        self.slots = literal_slots(self.instance)
        self.final: set[Ref] = set()
        self.named: set[Ref] = set()

    # values

    def value(self, arg: Any) -> Text:
        """Text of an argument: a value, a parameter or a number."""
        if isinstance(arg, Ref):
            self.left[arg] -= 1
            return self.values[arg]
        if isinstance(arg, Param):
            return Text(self.param(arg))
        return self.number(arg)

    def number(self, value: Any) -> Text:
        """Text of a number in forward: literals as they are, fields through attributes."""
        if isinstance(value, Expr):
            return Text(self.through_self(value), value.atom)
        if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
            return Text(f"{value:.1f}")
        return Text(repr(value))

    def through_self(self, expr: Expr) -> str:
        """An expression over `config` as one over attributes, which are set in `__init__`."""
        for name in expr.fields:
            self.attribute(name, f"config.{name}")
        self.body.fields.update(expr.fields)
        return expr.text.replace("config.", "self.")

    def attribute(self, name: str, init: str) -> str:
        """Let `__init__` set `self.<name>`; returns the text that reads it."""
        self.body.attributes.setdefault(name, Attribute(name, init))
        return f"self.{name}"

    def in_init(self, value: Any) -> str:
        """Text of a literal in `__init__`."""
        if isinstance(value, Expr):
            self.body.fields.update(value.fields)
            return value.text
        return self.number(value).text

    def literal(self, node: Node, key: str, position: int = 0) -> Text:
        """Text of an attribute of a node; by kind where the class's modules differ in it."""
        index = self.slots[(node.name, key, position)]
        value = self._slot_value(node, key, position)
        if index not in self.entry.literals:
            return self.number(value)
        return Text(self.by_kind(key if not key.startswith("arg") else "factor", index))

    def by_kind(self, hint: str, index: int) -> str:
        """An attribute whose value depends on the layer's kind."""
        init = self.body.choose({k: self.in_init(v) for k, v in self.entry.literals[index].items()})
        name = init if init in self.body.by_kind else "width" if hint == "shape" else hint
        while name in self.body.attributes and self.body.attributes[name].init != init:
            name += "_"
        return self.attribute(name, init)

    def _slot_value(self, node: Node, key: str, position: int) -> Any:
        source = (
            node.args[int(key[3:])]
            if key.startswith("arg")
            else (node.shape if key == "shape" else node.attrs[key])
        )
        return leaves(source)[position]

    def param(self, param: Param) -> str:
        """Text of a parameter that lies in this module."""
        prefix = f"{self.instance.path}." if self.instance.path else ""
        return f"self.{param.fqn.removeprefix(prefix)}"

    # statements

    def hint_chain(self) -> None:
        """Name what flows into an attention: q, k and v."""
        nodes = {i.name: i for i in self.instance.items if isinstance(i, Node)}
        calls = {r: i for i in self.instance.items if isinstance(i, Call) for r in i.outputs}
        for node in nodes.values():
            if node.op != "attend":
                continue
            for name, ref in zip("qkv", node.args, strict=False):
                while isinstance(ref, Ref) and ref not in self.values:
                    self.hints.setdefault(ref, name)
                    above = nodes.get(ref.name)
                    call = calls.get(ref)
                    if ref.part is not None and above is not None:
                        break
                    source = above.args[0] if above is not None and above.args else None
                    if call is not None:
                        source = call.inputs[0] if call.child.leaf is not None else None
                        if call.child.leaf is not None and call.child.leaf.op == "linear":
                            break
                    ref = source

    def run(self, items: list[Item], outputs: list[Ref]) -> Body:
        """Print `items`; the body's result is the text of `outputs`."""
        self.hint_chain()
        for item in items:
            for ref in _reads(item):
                self.left[ref] += 1
        for ref in outputs:
            self.left[ref] += 1
        last = _last_results(items)
        self.final = {r for r in outputs if r in last}
        self.named = {r for i in items if isinstance(i, Node) for r in _named_sources(i)}
        for source in (s for i in items if isinstance(i, Loop) for s, _ in i.sliced.values()):
            self.named.add(source)
            self.hints.setdefault(source, "per_layer")
        for item in items:
            if isinstance(item, Loop):
                self._loop(item)
            elif isinstance(item, Call):
                self._call(item)
            else:
                self._node(item)
        texts = [self.value(ref).text for ref in outputs]
        self.body.result = texts[0] if len(texts) == 1 else ", ".join(texts)
        return self.body

    def _define(self, ref: Ref, text: Text, hint: str, *, named: bool = False) -> None:
        """Give `ref` its text: inline where it is read once and short, else a variable."""
        short = len(text.text) <= INLINE and ref not in self.named
        if self.left[ref] == 1 and (short or ref in self.final) and not named:
            self.values[ref] = text
            return
        name = self._name(self.hints.get(ref, hint), ref)
        if text.text != name:
            self.body.lines.append(f"{name} = {text.text}")
        self.values[ref] = Text(name)

    def _name(self, hint: str, ref: Ref) -> str:
        """A free variable name: one that nothing still to be read depends on."""
        hint = re.sub(r"\W", "_", hint) or "x"
        name, number = hint, 1
        while self._busy(name):
            number += 1
            name = f"{hint}{number}"
        self.names[name] = ref
        return name

    def _busy(self, name: str) -> bool:
        word = re.compile(rf"(?<![\w.]){name}\b")
        return name in CONTEXT or any(
            self.left[ref] > 0 and word.search(text.text) for ref, text in self.values.items()
        )

    def _node(self, node: Node) -> None:
        text = print_op(self, node)
        if isinstance(node.shape, list):
            names = []
            for part in range(len(node.shape)):
                ref = Ref(node.name, part)
                if self.left[ref] <= 0:
                    names.append("_")
                    continue
                name = self._name(self.hints.get(ref, self._part_hint(ref)), ref)
                self.values[ref] = Text(name)
                names.append(name)
            self.body.lines.append(f"{', '.join(names)} = {text.text}")
            return
        self._define(Ref(node.name), text, self._hint(node))

    def _part_hint(self, ref: Ref) -> str:
        for item in self.instance.items:
            if isinstance(item, Node) and ref in item.refs():
                if item.op == "activation":
                    return "gate"
                if item.op == "gate":
                    return "up"
        return "part"

    def _hint(self, node: Node) -> str:
        if node.op in ("residual", "multiplier", "softcap"):
            return "x"
        if node.op == "attend":
            return "attended"
        if node.op == "rope_table":
            return "freqs_cis"
        if node.op in BINARY or node.op in ("activation", "gate"):
            return "x" if node.op in ("gate", "activation") else "y"
        source = next((a for a in node.args if isinstance(a, Ref)), None)
        text = self.values.get(source) if source is not None else None
        return text.text if text is not None and text.text.isidentifier() else "x"

    def _call(self, call: Call) -> None:
        child = call.child
        if child.leaf is not None:
            self._leaf(call)
            return
        arguments = ", ".join(self.value(r).text for r in call.inputs)
        text = f"self.{attribute_path(child.name)}({arguments})"
        if len(call.outputs) == 1:
            self._define(call.outputs[0], Text(text), _call_hint(child.name))
            return
        names = []
        for ref in call.outputs:
            name = self._name(self.hints.get(ref, "x"), ref)
            self.values[ref] = Text(name)
            names.append(name)
        self.body.lines.append(f"{', '.join(names)} = {text}")

    def _leaf(self, call: Call) -> None:
        leaf = call.child.leaf
        assert leaf is not None
        source = self.value(leaf.args[0])
        text = f"self.{attribute_path(call.child.name)}({source.text})"
        hint = (
            "x"
            if leaf.op in ("embedding", "layer_norm", "rms_norm")
            else _call_hint(call.child.name)
        )
        self._define(Ref(leaf.name), Text(text), hint)

    def _loop(self, loop: Loop) -> None:
        first = loop.calls[0]
        carried = {p: self.value(first.inputs[p]) for p in loop.carried}
        state = {}
        for position, text in carried.items():
            ref = first.inputs[position]
            name = self._name("x" if len(carried) == 1 else f"x{position + 1}", ref)
            if text.text != name:
                self.body.lines.append(f"{name} = {text.text}")
            state[position] = name
        arguments, kinds = [], False
        for position in range(len(first.inputs)):
            if position in state:
                arguments.append(state[position])
                continue
            if position in loop.sliced:
                source, axis = loop.sliced[position]
                arguments.append(f"{self.value(source).text}[{':, ' * axis}index]")
                continue
            refs = [c.inputs[position] for c in loop.calls]
            texts = {r: self.values[r].text for r in refs}
            for ref in refs[:1]:
                self.left[ref] -= 1
            if len(set(refs)) == 1:
                arguments.append(texts[refs[0]])
                continue
            kinds = True
            cases: dict[Any, str] = {}
            for call, ref in zip(loop.calls, refs, strict=True):
                cases[self.classes.kinds[call.child.path]] = texts[ref]
            name = self._name("tables", refs[0])
            pairs = ", ".join(f"{k!r}: {v}" for k, v in cases.items())
            self.body.lines.append(f"{name} = {{{pairs}}}")
            arguments.append(f"{name}[kind]")
        names = [state[p] for p in loop.carried]
        target = ", ".join(names)
        path = attribute_path(loop.name)
        variables, over = "layer", f"self.{path}"
        if kinds:
            self.attribute("kinds", "kinds")
            variables, over = "layer, kind", f"zip(self.{path}, self.kinds, strict=True)"
        if loop.sliced:
            variables = f"index, ({variables})" if kinds else f"index, {variables}"
            over = f"enumerate({over})"
        head = f"for {variables} in {over}:"
        self.body.lines += [head, f"    {target} = layer({', '.join(arguments)})"]
        for ref, name in zip(loop.calls[-1].outputs, names, strict=False):
            self.values[ref] = Text(name)
            self.names[name] = ref


def attribute_path(name: str) -> str:
    """A module's attribute path as Python: `layers.0.mlp` is `layers[0].mlp`."""
    parts = name.split(".")
    text = parts[0]
    for part in parts[1:]:
        text += f"[{part}]" if part.isdigit() else f".{part}"
    return text


def _call_hint(name: str) -> str:
    last = name.rpartition(".")[2]
    stem = re.sub(r"_?(proj|layer|linear)$", "", last) or last
    return "x" if stem.isdigit() or stem in ("mlp", "self_attn", "model") else stem


def _reads(item: Item) -> list[Ref]:
    if isinstance(item, Node):
        return item.refs()
    if isinstance(item, Call):
        return list(item.inputs)
    inputs = item.calls[0].inputs
    first = [item.sliced[p][0] if p in item.sliced else r for p, r in enumerate(inputs)]
    others = [
        c.inputs[p]
        for c in item.calls[1:]
        for p in range(len(first))
        if p not in item.carried and p not in item.sliced
    ]
    return first + [r for r in dict.fromkeys(others) if r not in first]


def _named_sources(node: Node) -> list[Ref]:
    """Values that read best under a name: queries, keys and values, before and after rotation."""
    read = {"attend": node.args[:3], "rope": node.args[:1]}.get(node.op, [])
    return [r for r in read if isinstance(r, Ref)]


def _last_results(items: list[Item]) -> set[Ref]:
    if not items:
        return set()
    last = items[-1]
    return {Ref(last.name)} if isinstance(last, Node) else set(last.outputs)
