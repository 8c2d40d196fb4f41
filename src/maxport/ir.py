"""The module graph: what a traced model computes, as plain dataclasses that print as Python.

Shapes are tuples of ints and of the two symbols `BATCH` and `TOKENS`; a product of either with a
number is a `Merged` axis. The IR knows nothing of torch or MAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Merged:
    """An axis in which the batch or token axis is flattened together with `rest` other elements."""

    batch: bool
    tokens: bool
    rest: int = 1

    def __repr__(self) -> str:
        parts = ["batch"] * self.batch + ["tokens"] * self.tokens
        return "*".join(parts + ([str(self.rest)] if self.rest != 1 else []))


BATCH = Merged(batch=True, tokens=False)
TOKENS = Merged(batch=False, tokens=True)
#: A length-dependent size that is no product of batch, tokens and a number.
ODD = Merged(batch=False, tokens=True, rest=-1)
Size = int | Merged


@dataclass(frozen=True)
class Ref:
    """The value that the node of this name defines; `part` selects one of several results."""

    name: str
    part: int | None = None

    def __repr__(self) -> str:
        return self.name if self.part is None else f"{self.name}[{self.part}]"


@dataclass(frozen=True)
class Param:
    """A weight of the traced model, by its full name; `buffer`: one that no checkpoint holds."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    buffer: bool = False

    def __repr__(self) -> str:
        return f"self.{self.fqn}"


@dataclass(frozen=True)
class Const:
    """A tensor constant of the trace that is no parameter, by its name in the trace."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Node:
    """One operation.

    Attributes:
        name: Unique name; refs use it.
        op: ATen's name without prefix and overload, an idiom's name, or `input`.
        args: Refs, params, numbers, strings, and lists of these.
        attrs: Named arguments.
        shape: Shape of the result; of every result where there are several.
        dtype: Dtype of the result ("bfloat16" is the working dtype).
        scope: Dotted path of the module that computes it.
        classes: HF class of each module on the way to `scope`, keyed by path.
        proof: Of an idiom, how it was shown equal to the traced nodes; empty for a plain op.
        line: Where the traced model computes it, `file.py:line`.
        home: Of an operation moved to its parent's scope, the module it came from.
    """

    name: str
    op: str
    args: list[Any] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    shape: Any = ()
    dtype: str = ""
    scope: str = ""
    classes: dict[str, str] = field(default_factory=dict)
    proof: str = ""
    line: str = ""
    home: str = ""

    def refs(self) -> list[Ref]:
        """Every value this node reads, in order."""
        found: list[Ref] = []
        map_values([self.args, self.attrs], lambda v: found.append(v) if isinstance(v, Ref) else v)
        return found


@dataclass
class Graph:
    """Nodes in execution order, and the value returned.

    `traced` counts the traced operations that compute values, before any idiom was recognised;
    `aliases` names, for each node, the traced nodes that compute the same and were merged into it.
    """

    nodes: list[Node]
    output: Ref
    traced: int = 0
    aliases: dict[str, list[str]] = field(default_factory=dict)

    def by_name(self) -> dict[str, Node]:
        """Nodes keyed by name."""
        return {node.name: node for node in self.nodes}

    def users(self) -> dict[str, list[Node]]:
        """For each node name, the nodes that read any of its results."""
        users: dict[str, list[Node]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in dict.fromkeys(ref.name for ref in node.refs()):
                users[name].append(node)
        return users

    def replace(self, old: Ref, new: Any) -> None:
        """Let every reader of `old` read `new` instead."""
        swap = lambda v: new if v == old else v  # noqa: E731
        for node in self.nodes:
            node.args = map_values(node.args, swap)
            node.attrs = map_values(node.attrs, swap)
        if self.output == old:
            self.output = new

    def sweep(self) -> None:
        """Drop nodes whose results nobody reads; inputs stay."""
        live = {self.output.name}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if node.name in live or node.op == "input":
                live.update(ref.name for ref in node.refs())
                kept.append(node)
        self.nodes = kept[::-1]

    def __str__(self) -> str:
        return "\n".join(render(node) for node in self.nodes) + f"\nreturn {self.output}"


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild nested lists, tuples and dicts with `change` applied to each leaf."""
    if isinstance(value, list):
        return [map_values(v, change) for v in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map_values(v, change) for v in value)
    if isinstance(value, dict):
        return {k: map_values(v, change) for k, v in value.items()}
    return change(value)


def walk_values(value: Any) -> Iterator[Any]:
    """Leaves of nested lists, tuples and dicts, in order."""
    if isinstance(value, list | tuple):
        for v in value:
            yield from walk_values(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from walk_values(v)
    else:
        yield value


def render(node: Node) -> str:
    """One node as a line of Python with its shape, dtype and origin as a comment."""
    args = [repr(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.attrs.items()]
    shape = ", ".join(map(str, node.shape)) if isinstance(node.shape, tuple) else str(node.shape)
    origin = f"  {node.line}" if node.line else ""
    return f"{node.name} = {node.op}({', '.join(args)})  # ({shape}) {node.dtype}{origin}"


def copy_graph(graph: Graph) -> Graph:
    """A copy whose nodes can be edited without touching `graph`."""
    nodes = [dataclasses.replace(n, args=list(n.args), attrs=dict(n.attrs)) for n in graph.nodes]
    return dataclasses.replace(graph, nodes=nodes)
