"""Sharding: V2's per-device copies, strategies and signal buffers, on one device.

For architectures that V2 registers for one device, whatever their layers could do: strategies and
`shard` methods go, a list of per-device copies becomes a list of one. Every such rewrite is
`review`, because the multi-device path is lost. For several devices see `parallel`.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from maxport.migrate.kinds import DROPPED_METHODS
from maxport.migrate.rewrite import Codemod, code_of, dotted, parse_statements

_ALLREDUCE = "max.nn.comm.allreduce.Allreduce"
_COLLECTIVES = frozenset(
    {"allreduce.sum", "allgather", "reducescatter.sum", "distributed_broadcast"}
)
_STRATEGY = ("sharding_strategy", "_sharding_strategy")


class Sharding(Codemod):
    """Drop strategies and `shard`; `self.x_shards = self.x.shard(d)` becomes a property."""

    NAME = "sharding"
    TRIGGER = r"shard|[Aa]llreduce|allgather|reducescatter|distributed_broadcast"

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        super().__init__(work)
        self.views: list[dict[str, str]] = []
        self.stored: list[dict[str, str]] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        """Start collecting per-device views."""
        self.views.append({})

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        """Add the collected views as properties at the end of the class."""
        views = self.views.pop()
        body = list(updated_node.body.body)
        for name, value in views.items():
            code = (
                "\n@property\n"
                f"def {name}(self) -> list[Any]:\n"
                '    """One entry per device; this variant runs on one."""\n'
                f"    return [{value}]\n"
            )
            self.work.need("typing", "Any")
            body += parse_statements(code)
        return updated_node.with_changes(body=updated_node.body.with_changes(body=body))

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Note which locals are also kept on self."""
        kept: dict[str, str] = {}
        for assign in m.findall(node, m.Assign(value=m.Name())):
            target = dotted(assign.targets[0].target)  # type: ignore[attr-defined]
            if target.startswith("self."):
                kept[assign.value.value] = target  # type: ignore[attr-defined]
        self.stored.append(kept)

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef | cst.RemovalSentinel:
        """Remove `shard` and `sharding_strategy` of layers."""
        self.stored.pop()
        if self.views and original_node.name.value in DROPPED_METHODS:
            self.note(original_node, "review", f"{original_node.name.value} dropped: one device")
            return cst.RemoveFromParent()
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Remove assignments to strategies; turn per-device copies into views."""
        if not self.views or len(original_node.body) != 1:
            return updated_node
        statement = original_node.body[0]
        target = _target(statement)
        done = updated_node.body[0]
        idle = isinstance(done, cst.Assign) and done.targets[0].target.deep_equals(done.value)
        if idle and not statement.deep_equals(done):
            return cst.RemoveFromParent()  # what is left of `x = allreduce(x)`
        if isinstance(target, cst.Attribute) and target.attr.value in _STRATEGY:
            self.note(original_node, "review", "sharding strategy dropped: one device")
            return cst.RemoveFromParent()
        value = getattr(statement, "value", None)
        if isinstance(value, cst.Call) and self._is_allreduce(value.func):
            self.note(original_node, "review", "Allreduce dropped: nothing to reduce on one device")
            return cst.RemoveFromParent()
        if (
            isinstance(target, cst.Attribute)
            and m.matches(target.value, m.Name("self"))
            and m.matches(value, m.Call(func=m.Attribute(attr=m.Name("shard"))))
        ):
            assert isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute)
            whole = code_of(value.func.value)
            if self.stored:
                whole = self.stored[-1].get(whole, whole)
            if whole == "super()":
                whole = "super().forward"  # the base class's own computation on the same weights
            if whole.startswith(("self.", "super()")):
                self.views[-1][target.attr.value] = whole
                self.note(original_node, "review", f"{target.attr.value}: one copy, on one device")
                return cst.RemoveFromParent()
        return updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If | cst.RemovalSentinel:
        """An `if` whose branches only set strategies goes with them."""
        return without_emptied(updated_node)

    def leave_For(
        self, original_node: cst.For, updated_node: cst.For
    ) -> cst.For | cst.RemovalSentinel:
        """A loop that only set strategies goes with them."""
        if _emptied(updated_node.body):
            return cst.RemoveFromParent()
        return updated_node

    def _is_allreduce(self, func: cst.BaseExpression) -> bool:
        name = dotted(func)
        return bool(name) and self.work.resolve(name).dotted == _ALLREDUCE

    def _collective(self, func: cst.BaseExpression) -> str:
        """Name of the collective op that is called; empty for anything else."""
        head, _, rest = dotted(func).partition(".")
        if head == "self" and rest == "allreduce":
            return rest
        found = self.work.resolve(head) if rest else None
        is_op = found is not None and found.dotted == "max.graph.ops"
        return rest if is_op and rest in _COLLECTIVES else ""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """`x.shard(devices)` -> `[x]`; a collective over one device -> its operand."""
        func = original_node.func
        collective = self._collective(func)
        if collective and len(updated_node.args) > 1:
            self.note(original_node, "review", f"{collective} over one device is its operand")
            operand = updated_node.args[0].value
            single = collective == "distributed_broadcast"
            return cst.List([cst.Element(operand)]) if single else operand
        if isinstance(func, cst.Attribute) and func.attr.value == "shard" and self.views:
            assert isinstance(updated_node.func, cst.Attribute)
            self.note(original_node, "review", f"{dotted(func)}: one copy, on one device")
            return cst.List([cst.Element(updated_node.func.value)])
        return updated_node


def without_emptied(node: cst.If) -> cst.If | cst.RemovalSentinel:
    """An `if` without a branch that a rewrite emptied; nothing where that was all of it."""
    orelse = node.orelse
    if isinstance(orelse, cst.Else) and _emptied(orelse.body):
        orelse = None
    if orelse is None and _emptied(node.body):
        return cst.RemoveFromParent()
    return node.with_changes(orelse=orelse)


def _emptied(block: cst.BaseSuite) -> bool:
    """True for a block whose last statement was removed; written code has at least `pass`."""
    return isinstance(block, cst.IndentedBlock) and not block.body


def _target(statement: cst.BaseSmallStatement) -> cst.BaseExpression | None:
    if isinstance(statement, cst.Assign) and len(statement.targets) == 1:
        return statement.targets[0].target
    return statement.target if isinstance(statement, cst.AnnAssign) else None
