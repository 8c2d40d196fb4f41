"""From module instances to classes: equal modules share one, differences become arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxport.emit.expr import Expr, FieldSource, Number
from maxport.emit.tables import Rope, Slopes
from maxport.emit.tree import Instance, Loop
from maxport.errors import MaxportError
from maxport.ir import Const, Node, Param, Ref, map_values, walk_values

Literal = Expr | Number | str | Rope | Slopes | None
#: Attributes whose values may differ between the layers that share a class.
_LITERAL = (int, float, str, Expr, Rope, Slopes, type(None))


@dataclass
class PortClass:
    """One class of the port.

    Attributes:
        name: Class name, the transformers class's where there is one kind of it.
        hf_class: Full name of the transformers class.
        instances: The modules it stands for.
        literals: For each varying literal of its body, its value by kind.
    """

    name: str
    hf_class: str
    instances: list[Instance]
    literals: dict[int, dict[Any, Literal]] = field(default_factory=dict)
    kinds: list[Any] = field(default_factory=list)

    @property
    def body(self) -> Instance:
        """The instance its source is written from."""
        return self.instances[0]


@dataclass(frozen=True)
class Kind:
    """What tells a model's kinds of layers apart.

    Attributes:
        text: Expression over `config` and `layer`.
        labels: The kind of each traced layer.
        fields: Configuration fields the expression reads.
        annotation: Python type of a label.
    """

    text: str
    labels: tuple[Any, ...]
    fields: tuple[str, ...]
    annotation: str


def leaves(value: Any) -> list[Any]:
    """The literals inside an attribute, in order."""
    return [v for v in walk_values(value) if isinstance(v, _LITERAL) and not isinstance(v, bool)]


def walk_literals(instance: Instance) -> Iterator[tuple[tuple[str, str, int], Any]]:
    """Every literal of the module's own operations, in a fixed order.

    Yields:
        Its place (node, attribute or `arg<n>` or `shape`, position there) and its value.
    """
    for item in instance.items if instance.leaf is None else [instance.leaf]:
        if not isinstance(item, Node):
            continue
        sources = [(key, item.attrs[key]) for key in sorted(item.attrs)]
        sources += [(f"arg{number}", arg) for number, arg in enumerate(item.args)]
        if item.op in ("reshape", "broadcast_to"):
            sources.append(("shape", item.shape))
        for key, source in sources:
            for position, value in enumerate(leaves(source)):
                yield (item.name, key, position), value


def literals_of(instance: Instance) -> list[Any]:
    """The values of `walk_literals`."""
    return [value for _, value in walk_literals(instance)]


def literal_slots(instance: Instance) -> dict[tuple[str, str, int], int]:
    """Index of every literal of a module's own operations by (node, attribute, position)."""
    return {place: index for index, (place, _) in enumerate(walk_literals(instance))}


def signature(instance: Instance, names: dict[str, str], *, literals: bool) -> str:
    """What makes two modules one class: operations, wiring, children, and perhaps literals.

    Args:
        instance: The module.
        names: Class key of every child module, by path.
        literals: Whether numbers count.
    """
    numbers: dict[Ref, str] = {ref: f"in{i}" for i, ref in enumerate(instance.inputs)}
    lines: list[str] = [instance.hf_class]

    def ref_text(ref: Ref) -> str:
        return numbers.setdefault(ref, f"v{len(numbers)}")

    def value_text(value: Any) -> Any:
        if isinstance(value, Ref):
            return ref_text(value)
        if isinstance(value, Param):
            inside = value.fqn.startswith(instance.path + ".") or not instance.path
            name = value.fqn[len(instance.path) + 1 :] if inside and instance.path else value.fqn
            shape = value.shape if literals else len(value.shape)
            return f"param {name} {shape}"
        if isinstance(value, Const):
            return f"const {value.name}"
        if isinstance(value, bool) or literals or not isinstance(value, _LITERAL):
            return str(value)
        return "none" if value is None else "#"

    for item in instance.items if instance.leaf is None else [instance.leaf]:
        if isinstance(item, Node):
            shape = item.shape if literals else ""
            args = map_values(item.args, value_text)
            attrs = map_values(item.attrs, value_text)
            lines.append(
                f"{ref_text(Ref(item.name))} {item.op} {args} {attrs} {shape} {item.dtype}"
            )
        elif isinstance(item, Loop):
            kinds = [names[c.child.path] for c in item.calls]
            lines.append(f"loop {item.name} {kinds} {[ref_text(r) for r in item.calls[0].inputs]}")
            for ref in item.outputs:
                ref_text(ref)
        else:
            inputs = [ref_text(r) for r in item.inputs]
            lines.append(f"call {item.child.name} {names[item.child.path]} {inputs}")
            for ref in item.outputs:
                ref_text(ref)
    lines.append(f"return {[numbers.get(r) for r in instance.outputs]}")
    return "\n".join(lines)


def all_instances(root: Instance) -> list[Instance]:
    """Every module, children before parents, one entry per path."""
    found: dict[str, Instance] = {}

    def visit(instance: Instance) -> None:
        for child in instance.children():
            visit(child)
        found.setdefault(instance.path, instance)

    visit(root)
    return list(found.values())


def deep_signature(instance: Instance) -> str:
    """The module with everything below it and all literals: layers equal in this are one kind."""
    names: dict[str, str] = {}
    for inner in all_instances(instance):
        text = signature(inner, names, literals=True)
        names[inner.path] = text.replace(instance.path + ".", "")
    return names[instance.path]


def find_kind(loop: Loop, fields: Sequence[FieldSource]) -> Kind | None:
    """What tells the layers of a list apart; None where all are alike.

    Raises:
        MaxportError: They differ in a way that neither a configuration list nor the index explains.
    """
    groups = [deep_signature(c.child) for c in loop.calls]
    if len(set(groups)) == 1:
        return None
    candidates = [*_list_kinds(fields, len(groups)), *_index_kinds(len(groups))]
    for kind in candidates:
        if _explains(kind.labels, groups):
            return kind
    for first in candidates:
        for second in candidates:
            labels = tuple(zip(first.labels, second.labels, strict=True))
            if first is not second and _explains(labels, groups):
                text = f"({first.text}, {second.text})"
                names = tuple(dict.fromkeys(first.fields + second.fields))
                return Kind(text, labels, names, f"tuple[{first.annotation}, {second.annotation}]")
    raise MaxportError(
        f"the layers of {loop.name} differ and nothing in the configuration says which is which",
        where=loop.name,
        fix="report the model",
    )


def _explains(labels: Sequence[Any], groups: Sequence[str]) -> bool:
    by_label: dict[Any, str] = {}
    for label, group in zip(labels, groups, strict=True):
        if by_label.setdefault(label, group) != group:
            return False
    return True


def _list_kinds(fields: Sequence[FieldSource], layers: int) -> list[Kind]:
    kinds = []
    for source in fields:
        values = source.values[0]
        if isinstance(values, list) and len(values) == layers and len(set(map(str, values))) > 1:
            annotation = "str" if isinstance(values[0], str) else type(values[0]).__name__
            text = f"config.{source.name}[layer]"
            kinds.append(Kind(text, tuple(values), (source.name,), annotation))
    return kinds


def _index_kinds(layers: int) -> list[Kind]:
    last = "layer == config.num_hidden_layers - 1"
    return [
        Kind("layer == 0", tuple(i == 0 for i in range(layers)), (), "bool"),
        Kind(last, tuple(i == layers - 1 for i in range(layers)), ("num_hidden_layers",), "bool"),
        Kind("layer % 2", tuple(i % 2 for i in range(layers)), (), "int"),
    ]


def label_name(label: Any) -> str:
    """A kind as part of a class name: `sliding_attention` is `SlidingAttention`."""
    if isinstance(label, tuple):
        return "".join(label_name(part) for part in label)
    words = re.split(r"[^0-9a-zA-Z]+", str(label))
    return "".join(word[:1].upper() + word[1:] for word in words if word)


@dataclass
class ClassMap:
    """Every class of the port, in an order in which each is defined before its use."""

    classes: list[PortClass]
    by_path: dict[str, PortClass]
    kinds: dict[str, Any]
    kind: Kind | None

    def of(self, instance: Instance) -> PortClass:
        """The class of a module."""
        return self.by_path[instance.path]


def group_classes(root: Instance, fields: Sequence[FieldSource]) -> ClassMap:
    """Find the kinds of layers and put equal modules into one class.

    Raises:
        MaxportError: Layers differ in a way that nothing explains.
    """
    kinds: dict[str, Any] = {}
    kind: Kind | None = None
    instances = all_instances(root)
    for instance in instances:
        for item in instance.items:
            if isinstance(item, Loop):
                found = find_kind(item, fields)
                if found is None:
                    continue
                if kind is not None and kind.text != found.text:
                    raise MaxportError("two layer lists with kinds of their own", where=item.name)
                kind = found
                for call, label in zip(item.calls, found.labels, strict=True):
                    for inner in all_instances(call.child):
                        kinds[inner.path] = label
    owned = _owned_params(root)
    by_path: dict[str, PortClass] = {}
    names: dict[str, str] = {}
    classes: dict[str, PortClass] = {}
    for instance in instances:
        key = f"{signature(instance, names, literals=False)} {owned.get(instance.path)}"
        if instance.path not in kinds and instance.leaf is None:
            key += f" {literals_of(instance)}"
        entry = classes.setdefault(key, PortClass("", instance.hf_class, []))
        entry.instances.append(instance)
        by_path[instance.path] = entry
        names[instance.path] = f"class{list(classes).index(key)}"
    for entry in classes.values():
        if entry.body.leaf is None:
            _vary(entry, kinds)
    _name(list(classes.values()), kinds)
    return ClassMap(list(classes.values()), by_path, kinds, kind)


def _owned_params(root: Instance) -> dict[str, list[str]]:
    """Names of the weights that lie in each module itself, wherever they are used.

    With their shapes where the port makes them itself: a norm over the heads of queries is no norm
    over the fewer heads of keys. MAX's own layers take their sizes as arguments.
    """
    leaves = {i.path for i in all_instances(root) if i.leaf is not None}
    owned: dict[str, set[str]] = {}
    for node in root.nodes():
        for value in walk_values([node.args, node.attrs]):
            if isinstance(value, Param):
                path, _, name = value.fqn.rpartition(".")
                shape = "" if path in leaves else value.shape
                owned.setdefault(path, set()).add(f"{name} {shape}")
    return {path: sorted(names) for path, names in owned.items()}


def _vary(entry: PortClass, kinds: dict[str, Any]) -> None:
    """Record the literals in which the instances of a class differ, by kind."""
    columns = [literals_of(i) for i in entry.instances]
    labels = [kinds.get(i.path) for i in entry.instances]
    entry.kinds = list(dict.fromkeys(labels))
    for index, values in enumerate(zip(*columns, strict=True)):
        if all(str(v) == str(values[0]) for v in values):
            continue
        by_kind: dict[Any, Literal] = {}
        for label, value in zip(labels, values, strict=True):
            if str(by_kind.setdefault(label, value)) != str(value):
                raise MaxportError(
                    f"modules of class {entry.hf_class.rpartition('.')[2]} differ in {value} and "
                    f"{by_kind[label]} without being of different kinds of layers",
                    where=entry.instances[0].path,
                    fix="report the model",
                )
        entry.literals[index] = by_kind


def _name(classes: list[PortClass], kinds: dict[str, Any]) -> None:
    by_hf: dict[str, list[PortClass]] = {}
    for entry in classes:
        by_hf.setdefault(entry.hf_class.rpartition(".")[2] or "Model", []).append(entry)
    for hf_name, entries in by_hf.items():
        inner = [e for e in entries if e.body.leaf is None]
        for entry in entries:
            entry.name = hf_name
        if len(inner) > 1:
            for entry in inner:
                suffix = "".join(label_name(k) for k in entry.kinds if k is not None)
                entry.name = f"{hf_name}{suffix}"
            names = [e.name for e in inner]
            for position, entry in enumerate(inner):
                if names.count(entry.name) > 1:
                    entry.name = f"{entry.name}{position + 1}"


def child_groups(entry: PortClass) -> dict[str, list[Instance]]:
    """For each child attribute of a class, that child in every instance of the class."""
    groups: dict[str, list[Instance]] = {}
    for instance in entry.instances:
        for child in instance.children():
            groups.setdefault(child.name, []).append(child)
    return groups
