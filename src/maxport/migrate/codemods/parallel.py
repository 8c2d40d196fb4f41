"""Tensor parallelism: V2's strategies, per-device layers and collectives, on a mesh of devices.

A layer keeps its strategy and its `shard`; what they do to a weight becomes its placement and its
local shards. A list of per-device layers becomes a property, because V3 counts every layer that an
attribute holds as one more set of parameters. Collectives need no signal buffers. On one device
everything is a list of one, and the graph is that of `sharding`.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from maxport.migrate.codemods.sharding import _target, without_emptied
from maxport.migrate.parallel import HELPERS, collective, declared, devices_of
from maxport.migrate.rewrite import (
    Codemod,
    code_of,
    dotted,
    keyword,
    manual_block,
    parse_statements,
)

_COLLECTIVES = {
    "allreduce.sum": ("allreduce_sum", ""),
    "allgather": ("allgather", "axis"),
    "reducescatter.sum": ("reduce_scatter", "axis"),
    "distributed_broadcast": ("broadcast", "devices"),
}


class Parallel(Codemod):
    """Strategies place weights; `self.x_shards = self.x.shard(d)` becomes a property."""

    NAME = "parallel"
    TRIGGER = r"shard|[Aa]llreduce|allgather|reducescatter|distributed_broadcast|self\.device_ref ="

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        super().__init__(work)
        self.classes: list[_Class] = []
        self.functions: list[cst.FunctionDef] = []
        self.blocked = ""

    def _helper(self, name: str) -> str:
        depth = len(self.work.plan.folder_of(self.work.module)) + 1
        self.work.need("." * depth + HELPERS, name)
        self.work.plan.extras.add(HELPERS)
        return name

    # --- classes -----------------------------------------------------------------------------

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        """Start collecting per-device views."""
        self.classes.append(_Class(node))

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        """Add the collected views as properties at the end of the class."""
        views = self.classes.pop().views
        body = list(updated_node.body.body)
        for name, value in views.items():
            self.work.need("typing", "Any")
            owner = self.work.plan.kinds, self.work.module, original_node.name.value
            # A base declares a plain attribute; a property in its place is sound, mypy disagrees.
            typed = "  # type: ignore[override]" if declared(*owner, name) else ""
            body += parse_statements(
                "\n@property\n"
                f"def {name}(self) -> list[Any]:{typed}\n"
                '    """One entry per device."""\n'
                f"    return {value}\n"
            )
        return updated_node.with_changes(body=updated_node.body.with_changes(body=body))

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Remember the function we are in."""
        self.functions.append(node)

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Leave it."""
        self.functions.pop()
        return updated_node

    # --- statements --------------------------------------------------------------------------

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        """Strategies of weights, per-device layers, `Allreduce`, subgraphs."""
        if len(original_node.body) != 1:
            return updated_node
        statement = original_node.body[0]
        value = getattr(statement, "value", None)
        if self.blocked:
            reason, self.blocked = self.blocked, ""
            was = code_of(original_node.with_changes(leading_lines=())).strip().splitlines()
            return cst.FlattenSentinel(manual_block(self.NAME, reason, was))
        if not self.classes:
            return updated_node
        target = _target(statement)
        if isinstance(target, cst.Attribute) and target.attr.value == "sharding_strategy":
            return self._strategy(original_node, updated_node, target)
        if target is not None and dotted(target) == "self.device_ref" and value is not None:
            self.note(original_node, "safe", "a part of a layer says which device it is on")
            told = parse_statements(f"self.device = {code_of(value)}\n")  # V3's own record
            return cst.FlattenSentinel([updated_node, *told])
        if isinstance(value, cst.Call) and self._is_allreduce(value.func):
            self.note(original_node, "safe", "Allreduce dropped: a function does it")
            return cst.RemoveFromParent()
        view = isinstance(target, cst.Attribute) and m.matches(target.value, m.Name("self"))
        if view and m.matches(value, m.Call(func=m.Attribute(attr=m.Name("shard")))):
            return self._view(original_node, updated_node, target.attr.value, value)  # type: ignore[union-attr,arg-type]
        return updated_node

    def _strategy(
        self,
        original: cst.SimpleStatementLine,
        updated: cst.SimpleStatementLine,
        target: cst.Attribute,
    ) -> cst.SimpleStatementLine:
        """`self.weight.sharding_strategy = s` -> `place(self, "weight", s)`; layers keep theirs."""
        owner, name = self._weight(target.value)
        if not owner:
            return updated
        self.note(original, "safe", f"strategy of {owner}.{name} becomes its placement")
        value = code_of(updated.body[0].value)  # type: ignore[union-attr,arg-type]
        call = cst.parse_expression(f'{self._helper("place")}({owner}, "{name}", {value})')
        return updated.with_changes(body=[cst.Expr(call)])

    def _view(
        self,
        original: cst.SimpleStatementLine,
        updated: cst.SimpleStatementLine,
        name: str,
        value: cst.Call,
    ) -> cst.BaseStatement | cst.RemovalSentinel:
        """`self.xs = self.x.shard(devices)` -> a property, over devices kept on self."""
        assert isinstance(value.func, cst.Attribute) and self.functions
        whole = self._kept(code_of(value.func.value))
        devices = code_of(value.args[0].value) if len(value.args) == 1 else ""
        if not (whole.startswith("self") or whole == "super()") or not devices:
            return updated
        self.note(original, "safe", f"{name}: a property over the devices")
        kept = self._kept(devices)
        line: cst.BaseStatement | cst.RemovalSentinel = cst.RemoveFromParent()
        if not kept.startswith("self."):
            kept = "self.shard_devices"
            line = updated.with_changes(
                body=parse_statements(f"{kept} = list({devices})\n")[0].body  # type: ignore[attr-defined]
            )
        if whole == "super()":
            made = f"super().shard({kept}) if len({kept}) > 1 else [super().forward]"
        elif whole == "self":
            made = f"self.shard({kept})"
        else:
            made = f"{self._helper('shards_of')}({whole}, {kept})"
        self.classes[-1].views[name] = made
        if kept == "self.shard_devices" and self.classes[-1].stored:
            return cst.RemoveFromParent()
        self.classes[-1].stored |= kept == "self.shard_devices"
        return line

    def _kept(self, text: str) -> str:
        """The attribute of self that the constructor also keeps a local (or `config.x`) under."""
        if text.startswith(("self.", "super()")) or not self.functions:
            return text
        for assign in m.findall(self.functions[-1], m.Assign()):
            assert isinstance(assign, cst.Assign)
            target = dotted(assign.targets[0].target)
            if target.startswith("self.") and code_of(assign.value) == text:
                return target
        return text

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If | cst.RemovalSentinel:
        """An `if` that is empty now goes."""
        return without_emptied(updated_node)

    # --- expressions -------------------------------------------------------------------------

    def _weight(self, node: cst.BaseExpression) -> tuple[str, str]:
        """(owner, attribute) of an expression that is a layer's weight; else empty."""
        if isinstance(node, cst.Attribute) and node.attr.value in self.work.plan.weights:
            return code_of(node.value), node.attr.value
        return "", ""

    def _is_allreduce(self, func: cst.BaseExpression) -> bool:
        name = dotted(func)
        return bool(name) and self.work.resolve(name).dotted == "max.nn.comm.allreduce.Allreduce"

    def _op(self, func: cst.BaseExpression) -> str:
        """The collective, or `shard_and_stack`, that is called; empty for anything else."""
        found = collective(self.work.sources, self.work.module, dotted(func))
        head, _, rest = dotted(func).partition(".")
        if not found and rest == "shard_and_stack":
            found = rest if self.work.resolve(head).dotted == "max.graph.ops" else ""
        return found

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Collectives, and `shard` of a weight."""
        op = self._op(original_node.func)
        if op == "shard_and_stack":
            self.note(original_node, "safe", "ops.shard_and_stack of placed weights")
            return updated_node.with_changes(func=cst.Name(self._helper(op)))
        if op:
            return self._collective(original_node, updated_node, op)
        func = original_node.func
        if isinstance(func, cst.Attribute) and func.attr.value == "shard":
            owner, name = self._weight(func.value)
            if owner:
                self.note(original_node, "safe", f"{owner}.{name}.shard: the weight's local shards")
                devices = code_of(updated_node.args[0].value)
                made = f'{self._helper("local_shards")}({owner}, "{name}", {devices})'
                return cst.parse_expression(made)
        return updated_node

    def _collective(self, original: cst.Call, updated: cst.Call, op: str) -> cst.BaseExpression:
        """`ops.allgather(xs, signals, axis=a)` -> `allgather(xs, axis=a)`."""
        name, extra = _COLLECTIVES[op]
        args = [a for a in updated.args if not _is(a, "signal_buffers")]
        if len(args) == len(updated.args):
            args = [args[0], *args[2:]]  # signal buffers by position
        args[0] = args[0].with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)
        if extra == "devices":
            devices = self._devices()
            if not devices:
                self._block(original, f"{op}: the devices are not known here")
                return updated
            args = [args[0], cst.Arg(cst.parse_expression(devices))]
        elif any(_is(a, "group_size") for a in args):
            self._block(original, f"{op} over groups of devices")
            return updated
        self.note(original, "safe", f"{op} without signal buffers")
        plain = [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in args]
        if extra == "axis" and len(plain) > 1 and plain[1].keyword is None:
            plain[1] = keyword("axis", plain[1].value)
        return cst.Call(cst.Name(self._helper(name)), plain)

    def _block(self, node: cst.Call, reason: str) -> None:
        """Let the statement around a call raise."""
        self.note(node, "manual", reason)
        self.blocked = reason

    def _devices(self) -> str:
        """The devices, as this place can name them."""
        if self.classes:
            found = devices_of(
                self.work.plan.kinds, self.work.module, self.classes[-1].node.name.value
            )
            if found:
                return found
        params = self.functions[-1].params if self.functions else None
        names = [p.name.value for p in (*params.params, *params.kwonly_params)] if params else []
        return "devices" if "devices" in names else ""

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """`self.weight.sharding_strategy` read."""
        if original_node.attr.value != "sharding_strategy":
            return updated_node
        owner, name = self._weight(original_node.value)
        if not owner:
            return updated_node
        return cst.parse_expression(f'{self._helper("strategy_of")}({owner}, "{name}")')

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        """What is assigned to is no read."""
        return not m.matches(node.target, m.Attribute(attr=m.Name("sharding_strategy")))


class _Class:
    """What is known of the class at work."""

    def __init__(self, node: cst.ClassDef) -> None:
        self.node = node
        self.views: dict[str, str] = {}
        self.stored = False


def _is(arg: cst.Arg, name: str) -> bool:
    """Whether an argument is given under, or is read from, a name."""
    if arg.keyword is not None:
        return str(arg.keyword.value) == name
    return dotted(arg.value).split(".")[-1] == name
