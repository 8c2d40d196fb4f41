"""One graph for every size: the ragged graphs of several twins laid over each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maxport.emit.expr import Expr, FieldSource, Lifter
from maxport.emit.tables import Slopes, lift_rope, lift_slopes
from maxport.errors import MaxportError
from maxport.idioms.rotary import Rotation
from maxport.ir import Const, Graph, Node, Param, Ref, walk_values


@dataclass
class Lifted:
    """A graph whose sizes and scalars are expressions, with the configuration they read."""

    graph: Graph
    fields: list[FieldSource]
    lifter: Lifter


@dataclass
class _Zip:
    lifter: Lifter
    further: Sequence[Mapping[str, tuple[int, ...]]]
    where: str = ""

    def values(self, items: tuple[Any, ...]) -> Any:
        """One value from the values that the twins have in the same place."""
        first = items[0]
        if isinstance(first, bool) or first is None or isinstance(first, str):
            if any(v != first for v in items):
                raise MaxportError(
                    f"the twins differ in {first!r} and {items[1]!r}, which is no number",
                    where=self.where,
                    fix="report the model; its structure depends on its size",
                )
            return first
        if isinstance(first, int | float):
            return self.lifter.lift(items, self.where)
        if isinstance(first, list | tuple) and not (first and isinstance(first[0], float)):
            if len({len(v) for v in items}) != 1:
                raise MaxportError("the twins differ in structure", where=self.where)
            return type(first)(self.values(v) for v in zip(*items, strict=True))
        if isinstance(first, dict):
            return {
                k: self._slopes(items) if k == "slopes" else self.values(tuple(v[k] for v in items))
                for k in first
            }
        if isinstance(first, Rotation):
            return lift_rope(self.lifter, items, self.where)
        if isinstance(first, Param | Const):
            shapes = [i.shape for i in items]
            name = first.fqn if isinstance(first, Param) else ""
            for known in self.further:
                if name not in known or len(known[name]) != len(first.shape):
                    break
                shapes.append(known[name])
            shape = tuple(self.values(v) for v in zip(*shapes, strict=True))
            return replace(first, shape=shape)
        return first

    def _slopes(self, items: tuple[Any, ...]) -> Slopes:
        return lift_slopes(self.lifter, tuple(v["slopes"] for v in items), self.where)


def lift(
    graphs: Sequence[Graph],
    fields: Sequence[FieldSource],
    shapes: Sequence[Mapping[str, tuple[int, ...]]] = (),
) -> Lifted:
    """Lay the twins' ragged graphs over each other.

    Args:
        graphs: One graph per twin, of the same structure.
        fields: Every number of the configuration with its value in each twin, in the same order;
            there may be more twins here than graphs.
        shapes: Shapes of the weights in each further twin, which confirm their expressions.

    Raises:
        MaxportError: The structures differ, or a number cannot be tied to the configuration.
    """
    _check_lengths(graphs)
    zipper = _Zip(Lifter(fields), shapes)
    for param in _params(graphs):
        zipper.values(param)
    nodes = _laid(graphs, zipper)
    tried: set[str] = set()
    while _better(nodes, len(graphs), zipper.lifter, tried):
        nodes = _laid(graphs, zipper)
    _tie_depth(nodes, zipper.lifter)
    graph = Graph(nodes, graphs[0].output, graphs[0].traced)
    return Lifted(graph, list(fields), zipper.lifter)


def _check_lengths(graphs: Sequence[Graph]) -> None:
    """Raises where a module has more operations in one twin than in another."""
    counts = [len(g.nodes) for g in graphs]
    if len(set(counts)) == 1:
        return
    steps = ([(n.scope, n.op) for n in g.nodes] for g in graphs)
    same = itertools.takewhile(lambda group: len(set(group)) == 1, zip(*steps, strict=False))
    node = graphs[0].nodes[min(sum(1 for _ in same), counts[0] - 1)]
    raise MaxportError(
        f"the model's structure depends on its size: {', '.join(map(str, counts))} operations",
        where=f"{node.scope or 'the model itself'}, {node.line}",
        fix="port this module by hand: it repeats operations as often as a size says",
    )


def _laid(graphs: Sequence[Graph], zipper: _Zip) -> list[Node]:
    """The nodes of all graphs as one list, its numbers lifted."""
    nodes: list[Node] = []
    for group in zip(*(g.nodes for g in graphs), strict=True):
        first = group[0]
        zipper.where = f"{first.scope or 'the model itself'}, {first.line}"
        if any(n.op != first.op for n in group):
            raise MaxportError(
                f"the model's structure depends on its size: {first.op} becomes {group[1].op}",
                where=zipper.where,
                fix="report the model",
            )
        nodes.append(
            replace(
                first,
                args=zipper.values(tuple(n.args for n in group)),
                attrs=zipper.values(tuple(n.attrs for n in group)),
                shape=zipper.values(tuple(n.shape for n in group)),
            )
        )
    return nodes


def _better(nodes: Sequence[Node], traced: int, lifter: Lifter, tried: set[str]) -> bool:
    """Exchange one size's expression that only fits the traced twins; False if there is none.

    A reshape shows it: its two sides agree at the traced twins and not at a confirming one.
    Expressions in `tried` are not taken again.
    """
    shapes = {n.name: n.shape for n in nodes}
    for node in nodes:
        value = node.args[0] if node.op == "reshape" else None
        source = shapes.get(value.name) if isinstance(value, Ref) else None
        if not isinstance(source, tuple) or not isinstance(node.shape, tuple):
            continue
        if _rows(source) == _rows(node.shape):
            continue
        for axis, size in enumerate(node.shape):
            if not isinstance(size, Expr):
                continue
            known = size.values[:traced]
            tried.add(size.text)
            for other in lifter.matches(known):
                changed = (*node.shape[:axis], other, *node.shape[axis + 1 :])
                if other.text not in tried and _rows(source) == _rows(changed):
                    lifter.found[known] = other
                    return True
    return False


def _tie_depth(nodes: Sequence[Node], lifter: Lifter) -> None:
    """Tie sizes that are the number of layers, which is the same in all traced twins, to it.

    A reshape whose two sides only agree at the confirming twin's depth shows such a size.
    """
    depth = next((e for e in lifter.ints if e.fields == ("num_hidden_layers",)), None)
    shapes = {n.name: n.shape for n in nodes}
    for node in nodes if depth is not None else ():
        value = node.args[0] if node.op == "reshape" else None
        source = shapes.get(value.name) if isinstance(value, Ref) else None
        if depth is None or not isinstance(source, tuple) or not isinstance(node.shape, tuple):
            continue
        if _rows(source) == _rows(node.shape):
            continue
        for axis, size in enumerate(node.shape):
            tied = (*node.shape[:axis], depth, *node.shape[axis + 1 :])
            if size == depth.values[0] and _rows(source) == _rows(tied):
                node.shape = shapes[node.name] = tied
                break


def _rows(shape: tuple[Any, ...]) -> int:
    """Elements per token at the last twin."""
    sizes = [s.values[-1] if isinstance(s, Expr) else s for s in shape]
    return math.prod(s for s in sizes if isinstance(s, int))


def _params(graphs: Sequence[Graph]) -> list[tuple[Param, ...]]:
    """Every weight in all graphs; their sizes are lifted first, since they are known best."""
    columns = []
    for graph in graphs:
        leaves = [v for n in graph.nodes for v in walk_values([n.args, n.attrs])]
        columns.append([v for v in leaves if isinstance(v, Param)])
    return list(zip(*columns, strict=False))
