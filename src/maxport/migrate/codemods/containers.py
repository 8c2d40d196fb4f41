"""Containers: LayerList and Sequential become ModuleList, which is a list."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from maxport.migrate import api
from maxport.migrate.rewrite import Codemod, dotted


class Containers(Codemod):
    """`LayerList(xs)`, `Sequential(xs)` -> `ModuleList(xs)`; `self.xs.layers` -> `self.xs`."""

    NAME = "containers"
    TRIGGER = r"LayerList|Sequential"

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
