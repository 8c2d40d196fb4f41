"""Containers: LayerList and Sequential become ModuleList, which is a list.

V2 keeps plain lists out of a module's parameters, V3 takes them in. So a plain list that a
container wraps as a whole is held once, by the container, and read through a property.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from maxport.migrate import api
from maxport.migrate.rewrite import Codemod, dotted, parse_statements

_STRING = m.SimpleStatementLine([m.Expr(m.SimpleString() | m.ConcatenatedString())])


class Containers(Codemod):
    """`LayerList(xs)`, `Sequential(xs)` -> `ModuleList(xs)`; `self.xs.layers` -> `self.xs`."""

    NAME = "containers"
    TRIGGER = r"LayerList|Sequential"

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        super().__init__(work)
        self.plain: list[dict[str, str]] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        """Find `self.a = [...]` that `self.b = LayerList(self.a)` wraps: a -> b."""
        lists = m.findall(node, m.Assign(value=m.List() | m.ListComp()))
        made = {dotted(found.targets[0].target) for found in lists}  # type: ignore[attr-defined]
        wrapped: dict[str, str] = {}
        for found in m.findall(node, m.Assign(value=m.Call(args=[m.Arg()]))):
            assert isinstance(found, cst.Assign) and isinstance(found.value, cst.Call)
            inner = dotted(found.value.args[0].value)
            if inner in made and inner.startswith("self.") and self._container(found.value):
                wrapped[inner] = dotted(found.targets[0].target)
        self.plain.append(wrapped)

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        """Read a wrapped list through a property instead of declaring it."""
        names = {a.removeprefix("self."): b for a, b in self.plain.pop().items()}
        if not names:
            return updated_node
        body: list[cst.BaseStatement] = []
        described = False
        for item in updated_node.body.body:
            if described and m.matches(item, _STRING):
                described = False
                continue
            described = m.matches(item, m.SimpleStatementLine([m.AnnAssign(value=None)])) and (
                dotted(item.body[0].target) in names  # type: ignore[union-attr]
            )
            if not described:
                body.append(item)  # type: ignore[arg-type]
        for name, holder in names.items():
            held = f"list({holder})"
            given = self.work.plan.parallel and self._given(original_node, name)
            value = f'vars(self).get("{name}", {held})' if given else held
            code = (
                "\n@property\n"
                f"def {name}(self) -> list[Any]:\n"
                f'    """The modules that {holder.removeprefix("self.")} holds."""\n'
                f"    return {value}\n"
            )
            if given:  # a device's part of the layer may hold others
                code += (
                    f"\n@{name}.setter\n"
                    f"def {name}(self, modules: list[Any]) -> None:\n"
                    f'    vars(self)["{name}"] = modules\n'
                )
            self.work.need("typing", "Any")
            body += parse_statements(code)
        return updated_node.with_changes(body=updated_node.body.with_changes(body=body))

    @staticmethod
    def _given(node: cst.ClassDef, name: str) -> bool:
        """Whether the class sets the list on another instance, as `shard` does."""
        targets = m.findall(node, m.AssignTarget(m.Attribute(attr=m.Name(name))))
        return any(dotted(found.target) != f"self.{name}" for found in targets)  # type: ignore[attr-defined]

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """`self.a = [...]` becomes `self.b = ModuleList([...])`; the wrapping line goes."""
        names = self.plain[-1] if self.plain else {}
        statement = updated_node.body[0]
        if not names or not isinstance(statement, cst.Assign):
            return updated_node
        target = dotted(statement.targets[0].target)
        if target in names and isinstance(statement.value, cst.List | cst.ListComp):
            self.work.need("max.experimental.nn.sequential", "ModuleList")
            self.note(original_node, "safe", f"{target} is held by {names[target]} alone")
            made = cst.Call(cst.Name("ModuleList"), [cst.Arg(statement.value)])
            holder = cst.AssignTarget(cst.parse_expression(names[target]))  # type: ignore[arg-type]
            return updated_node.with_changes(
                body=[statement.with_changes(targets=[holder], value=made)]
            )
        value = original_node.body[0].value  # type: ignore[union-attr]
        wraps = isinstance(value, cst.Call) and len(value.args) == 1 and self._container(value)
        if wraps and dotted(value.args[0].value) in names:
            return cst.RemoveFromParent()
        return updated_node

    def visit_Module(self, node: cst.Module) -> None:
        """Find the attributes that hold a container."""
        self.held: set[str] = set()
        for assign in m.findall(node, m.Assign(value=m.Call())):
            assert isinstance(assign, cst.Assign) and isinstance(assign.value, cst.Call)
            if self._container(assign.value):
                target = dotted(assign.targets[0].target)
                if target.startswith("self."):
                    self.held.add(target)

    def _container(self, call: cst.Call) -> bool:
        name = dotted(call.func)
        return bool(name) and self.work.resolve(name).dotted in api.CONTAINERS

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Rename the constructor."""
        if not self._container(original_node):
            return updated_node
        self.work.need("max.experimental.nn.sequential", "ModuleList")
        self.note(original_node, "safe", f"{dotted(original_node.func)} becomes ModuleList")
        return updated_node.with_changes(func=cst.Name("ModuleList"))

    def leave_Annotation(
        self, original_node: cst.Annotation, updated_node: cst.Annotation
    ) -> cst.Annotation:
        """Rename it in annotations."""
        name = dotted(original_node.annotation)
        if name and self.work.resolve(name).dotted in api.CONTAINERS:
            self.work.need("max.experimental.nn.sequential", "ModuleList")
            return updated_node.with_changes(annotation=cst.Name("ModuleList"))
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """The list is the container itself."""
        if original_node.attr.value == "layers" and dotted(original_node.value) in self.held:
            self.note(original_node, "safe", f"{dotted(original_node)}: the ModuleList itself")
            return updated_node.value
        return updated_node
