"""From a flat graph to modules: instances that follow the model's own module hierarchy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from maxport.emit.tables import Rope
from maxport.errors import MaxportError
from maxport.ir import Graph, Node, Param, Ref, map_values, walk_values

#: Idioms that are modules of their own in MAX.
LEAVES = {"embedding", "layer_norm", "linear", "rms_norm"}
#: Values every layer may need besides tensors that flow through the model.
CONTEXT = ("tokens", "positions", "kv", "row_offsets")


@dataclass
class Call:
    """A call of a child module: `child(*inputs)` gives `outputs`."""

    child: Instance
    inputs: list[Ref]
    outputs: list[Ref]


@dataclass
class Loop:
    """Consecutive calls of the items of a module list, each fed by the one before.

    Attributes:
        name: The list's attribute path.
        calls: One call per item.
        carried: Positions of the inputs that come from the item before.
        sliced: For inputs that are the item's own slice of a value, that value and the axis.
    """

    name: str
    calls: list[Call]
    carried: list[int]
    sliced: dict[int, tuple[Ref, int]] = field(default_factory=dict)

    @property
    def outputs(self) -> list[Ref]:
        """What the last item returns."""
        return self.calls[-1].outputs


Item = Node | Call | Loop


@dataclass
class Instance:
    """One module of the model.

    Attributes:
        path: Full dotted path; empty for the model itself.
        name: Attribute path relative to its parent.
        hf_class: Full name of the transformers class.
        items: Own operations and calls of children, in order.
        inputs: Values it reads from outside.
        outputs: Values it defines that are read outside.
        leaf: The one operation of a module that MAX has itself, else None.
    """

    path: str
    name: str
    hf_class: str
    items: list[Item] = field(default_factory=list)
    inputs: list[Ref] = field(default_factory=list)
    outputs: list[Ref] = field(default_factory=list)
    leaf: Node | None = None

    def children(self) -> Iterator[Instance]:
        """Child modules in order of first call, list items one by one."""
        seen: set[str] = set()
        for item in self.items:
            calls = (
                [item] if isinstance(item, Call) else item.calls if isinstance(item, Loop) else []
            )
            for call in calls:
                if call.child.path not in seen:
                    seen.add(call.child.path)
                    yield call.child

    def nodes(self) -> Iterator[Node]:
        """Every operation in it and below."""
        for item in self.items:
            if isinstance(item, Node):
                yield item
        for child in self.children():
            yield from child.nodes()
        if self.leaf is not None:
            yield self.leaf


def params_of(node: Node) -> list[Param]:
    """The parameters an operation reads."""
    return [v for v in walk_values([node.args, node.attrs]) if isinstance(v, Param)]


def _owner(param: Param) -> str:
    return param.fqn.rpartition(".")[0]


def add_context(graph: Graph) -> list[Rope]:
    """Make implicit inputs explicit: the cache, the row offsets and rotary tables.

    Returns:
        The distinct rotary tables, in order; node `rope_table_<n>` defines the n-th.
    """
    tables: list[Rope] = []
    for node in graph.nodes:
        if node.op == "attend":
            node.args = [*node.args, Ref("kv"), Ref("row_offsets")]
        elif node.op == "rope":
            rope: Rope = node.attrs["rotation"]
            keys = [t.table for t in tables]
            if rope.table not in keys:
                tables.append(rope)
                keys.append(rope.table)
            table = Ref(f"rope_table_{keys.index(rope.table)}")
            node.args = [node.args[0], table, Ref("kv"), Ref("row_offsets")]
    for index, rope in enumerate(tables):
        name = f"rope_table_{index}"
        users = [n for n in graph.nodes if n.op == "rope" and n.args[1] == Ref(name)]
        scope = _common_scope([n.scope for n in users])
        at, like = _before_use(graph, users[0], scope)
        classes = {k: v for k, v in users[0].classes.items() if _inside(scope, k)}
        node = Node(
            name, "rope_table", [like], {"rope": rope}, ("table", rope.width), "bfloat16",
            scope, classes, proof="part of rope",
        )  # fmt: skip
        graph.nodes.insert(at, node)
    return tables


def _common_scope(scopes: Sequence[str]) -> str:
    """The innermost module that contains all, and that is no item of a list."""
    parts = [s.split(".") for s in scopes]
    common = []
    for group in zip(*parts, strict=False):
        if len(set(group)) != 1:
            break
        common.append(group[0])
    for index, part in enumerate(common):
        if part.isdigit():
            common = common[: max(index - 1, 0)]
            break
    else:
        if len(set(scopes)) > 1 and common and not _is_module(common, scopes):
            common = common[:-1]
    return ".".join(common)


def _is_module(common: list[str], scopes: Sequence[str]) -> bool:
    """Whether the path is a module and not a list: the next part of some scope is no number."""
    depth = len(common)
    following = [s.split(".")[depth] for s in scopes if len(s.split(".")) > depth]
    return not any(f.isdigit() for f in following)


def _before_use(graph: Graph, user: Node, scope: str) -> tuple[int, Ref]:
    """Where in `scope` a table that `user` reads is computed, and a value with its dtype."""
    child = _next_scope(user, scope)
    first = user
    if child is not None:
        stem, _, index = child.rpartition(".")
        child = stem if index.isdigit() else child
        first = next(n for n in graph.nodes if _inside(n.scope, child))
    inputs = {n.name for n in graph.nodes if n.op == "input"}
    like = next(r for r in first.refs() if r.name not in inputs and r.name not in CONTEXT)
    return graph.nodes.index(first), like


def name_sequentials(graph: Graph) -> dict[str, str]:
    """Give every called module a name that is one attribute of the module that calls it.

    Returns:
        New prefixes of parameters by their prefixes in the checkpoint.
    """
    called = {path for node in graph.nodes for path in node.classes}
    renamed: dict[str, str] = {}

    # Containers whose forward never runs: `model` where the head calls `model.decoder` itself.
    uncalled: dict[int, set[str]] = {}
    for path in called:
        parts = path.split(".")
        for index in range(1, len(parts)):
            if ".".join(parts[:index]) not in called and not parts[index].isdigit():
                uncalled.setdefault(index, set()).add(parts[index - 1])

    def named(path: str) -> str:
        parts = path.split(".")
        out: list[str] = []
        for index, part in enumerate(parts):
            inside = ".".join(parts[:index]) in called and index > 0
            name = f"part_{part}" if part.isdigit() and inside else part
            if out and out[-1] in uncalled.get(index, ()) and not part.isdigit():
                out[-1] = f"{out[-1]}_{name}"
            else:
                out.append(name)
        return ".".join(out)

    def change(value: Any) -> Any:
        if isinstance(value, Param):
            owner = _owner(value)
            before, after = owner.split("."), named(owner).split(".")
            if before != after:
                while len(before) > 1 and len(after) > 1 and before[-1] == after[-1]:
                    before, after = before[:-1], after[:-1]
                renamed[f"{'.'.join(before)}."] = f"{'.'.join(after)}."
            return replace(value, fqn=named(value.fqn))
        return value

    for node in graph.nodes:
        node.args, node.attrs = map_values(node.args, change), map_values(node.attrs, change)
    for node in graph.nodes:
        node.scope = named(node.scope)
        node.classes = {named(path): cls for path, cls in node.classes.items()}
    return renamed


def name_leaf_weights(graph: Graph) -> dict[str, str]:
    """Call the weights of MAX's own modules `weight` and `bias`, as MAX does.

    Returns:
        New names of parameters by their names in the checkpoint, where they differ.
    """
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if node.op not in LEAVES or not _is_own_leaf(node, node.scope):
            continue
        for key in ("weight", "bias"):
            param = node.attrs.get(key)
            if isinstance(param, Param) and param.fqn != f"{node.scope}.{key}":
                renamed[param.fqn] = f"{node.scope}.{key}"

    def change(value: Any) -> Any:
        known = isinstance(value, Param) and value.fqn in renamed
        return replace(value, fqn=renamed[value.fqn]) if known else value

    for node in graph.nodes:
        node.args, node.attrs = map_values(node.args, change), map_values(node.attrs, change)
    return renamed


def settle_scopes(graph: Graph) -> None:
    """Move operations out of modules without weights, such as activations, to the parent."""
    owners = {_owner(p) for n in graph.nodes for p in params_of(n)}
    leaves = {n.scope for n in graph.nodes if n.op in LEAVES and _is_own_leaf(n, n.scope)}

    heads = {
        n.scope
        for n in graph.nodes
        if n.op == "linear" and _owner(n.attrs["weight"]) not in ("", n.scope)
    }

    def keep(path: str) -> bool:
        if path in heads:
            return False
        if path == "" or path in leaves:
            return True
        return any(o == path or o.startswith(path + ".") for o in owners)

    for node in graph.nodes:
        node.home = node.scope
        while node.scope and not keep(node.scope):
            chain = [p for p in node.classes if p != node.scope and _inside(node.scope, p)]
            node.classes = {p: c for p, c in node.classes.items() if p != node.scope}
            node.scope = max(chain, key=len, default="")


def _inside(path: str, outer: str) -> bool:
    return outer == "" or path == outer or path.startswith(outer + ".")


def build_tree(graph: Graph) -> Instance:
    """The module instances of a lifted ragged graph whose scopes are settled."""
    nodes = [n for n in graph.nodes if n.op != "input"]
    root_class = next((n.classes[""] for n in nodes if "" in n.classes), "")
    root = _instance("", "", root_class, nodes, graph)
    root.outputs = [graph.output]
    return root


def _next_scope(node: Node, path: str) -> str | None:
    """The child of `path` on the way to the node's scope; None if the node is its own."""
    if node.scope == path:
        return None
    below = [p for p in node.classes if p != path and _inside(p, path) and _inside(node.scope, p)]
    return min(below, key=len, default=None)


def _instance(path: str, name: str, hf_class: str, nodes: list[Node], graph: Graph) -> Instance:
    instance = Instance(path, name, hf_class)
    if len(nodes) == 1 and nodes[0].op in LEAVES and _is_own_leaf(nodes[0], path):
        instance.leaf = nodes[0]
    group: list[Node] = []
    current: str | None = None

    def flush() -> None:
        if group and current is not None:
            relative = current[len(path) + 1 :] if path else current
            child = _instance(current, relative, group[0].classes[current], list(group), graph)
            instance.items.append(Call(child, child.inputs, child.outputs))
        group.clear()

    if instance.leaf is None:
        for node in nodes:
            child = _next_scope(node, path)
            if child != current:
                flush()
                current = child
            if child is None:
                instance.items.append(node)
            else:
                group.append(node)
        flush()
        instance.items = _loops(instance.items)
    _interface(instance, nodes, graph)
    return instance


def _is_own_leaf(node: Node, path: str) -> bool:
    """Whether all weights of a leaf operation lie in the module that computes it."""
    weights = params_of(node)
    if node.scope != path or not path:
        return False
    if not weights:
        return node.op in ("layer_norm", "rms_norm")
    return all(_owner(p) == path and len(p.shape) <= 2 for p in weights)


def _interface(instance: Instance, nodes: list[Node], graph: Graph) -> None:
    own = {n.name for n in nodes}
    inputs: dict[Ref, None] = {}
    for node in nodes:
        for ref in node.refs():
            if ref.name not in own:
                inputs.setdefault(ref)
    instance.inputs = sorted(inputs, key=_input_rank)
    outside = [n for n in graph.nodes if n.name not in own]
    outputs: dict[Ref, None] = {}
    for node in outside:
        for ref in node.refs():
            if ref.name in own:
                outputs.setdefault(ref)
    if graph.output.name in own:
        outputs.setdefault(graph.output)
    instance.outputs = list(outputs)


def _input_rank(ref: Ref) -> int:
    """Hidden states first, then tables, then the cache and offsets."""
    if ref.name.startswith("rope_table_"):
        return 1
    return 2 + CONTEXT.index(ref.name) if ref.name in CONTEXT else 0


def _loops(items: list[Item]) -> list[Item]:
    """Fold calls of `list.0`, `list.1`, ... into loops."""
    slices = _own_slices(items)
    items = [i for i in items if not (isinstance(i, Node) and Ref(i.name) in slices)]
    out: list[Item] = []
    run: list[Call] = []

    def flush() -> None:
        if len(run) > 1:
            out.append(_loop(run, slices))
        else:
            out.extend(run)
        run.clear()

    for item in items:
        stem, _, index = item.child.name.rpartition(".") if isinstance(item, Call) else ("", "", "")
        if isinstance(item, Call) and index.isdigit() and stem:
            expected = run and run[-1].child.name.rpartition(".")[0] == stem
            if not expected:
                flush()
            run.append(item)
        else:
            flush()
            out.append(item)
    flush()
    return out


def _own_slices(items: list[Item]) -> dict[Ref, Node]:
    """Slices `values[i]` that only item `i` of a list reads, as per-layer inputs are."""
    readers: dict[Ref, list[Item]] = {}
    for item in items:
        for ref in item.refs() if isinstance(item, Node) else item.inputs:  # type: ignore[union-attr]
            readers.setdefault(ref, []).append(item)
    slices: dict[Ref, Node] = {}
    for item in items:
        if not isinstance(item, Node) or item.op != "select":
            continue
        users = readers.get(Ref(item.name), [])
        only = users[0] if len(users) == 1 else None
        if not isinstance(only, Call):
            continue
        if only.child.name.rpartition(".")[2] == str(item.attrs["index"]):
            slices[Ref(item.name)] = item
    return slices


def _loop(calls: list[Call], slices: dict[Ref, Node]) -> Loop:
    name = calls[0].child.name.rpartition(".")[0]
    flowing: list[list[Ref]] = []
    own: list[list[Ref]] = []
    for index, call in enumerate(calls):
        own.append([r for r in call.inputs if r in slices])
        values = [r for r in call.inputs if _input_rank(r) == 0 and r not in slices]
        before = calls[index - 1].outputs if index else values
        if set(values) - set(before) or len(values) != len(calls[0].outputs):
            raise MaxportError(
                f"the layers of {name} are not fed one by the other",
                where=call.child.path,
                fix="this model passes values around its layers; port it by hand",
            )
        flowing.append(values)
    sources = {tuple((slices[r].args[0], slices[r].attrs["axis"]) for r in refs) for refs in own}
    if len(sources) != 1:
        raise MaxportError(
            f"the layers of {name} read slices of different values",
            where=calls[0].child.path,
            fix="this model passes values around its layers; port it by hand",
        )
    _same_arguments(calls, [[*v, *o] for v, o in zip(flowing, own, strict=True)])
    carried = len(flowing[0])
    sliced = {carried + i: source for i, source in enumerate(sources.pop())}
    return Loop(name, list(calls), list(range(carried)), sliced)


def _same_arguments(calls: list[Call], flowing: list[list[Ref]]) -> None:
    """Let all items of a list take the same arguments; an item may leave a table unused."""
    tables = [[r for r in c.inputs if _input_rank(r) == 1] for c in calls]
    most = max(tables, key=len)
    context = sorted({r for c in calls for r in c.inputs if _input_rank(r) > 1}, key=_input_rank)
    for call, values, own in zip(calls, flowing, tables, strict=True):
        padded = own + [r for r in most if r not in own][: len(most) - len(own)]
        call.inputs = call.child.inputs = [*values, *padded, *context]
