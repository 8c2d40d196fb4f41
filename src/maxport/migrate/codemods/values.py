"""Values: what TensorValue has and Tensor has not, device arguments, truth of a parameter."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from maxport.migrate.rewrite import Codemod, code_of, dotted

_FUNCTIONAL = {"rebind", "flatten"}


class Values(Codemod):
    """Members and conversions of graph values, on Tensors."""

    NAME = "values"
    TRIGGER = (
        r"Tensor \| None|TensorValue|\.to\(|\.rebind|\.flatten|\.type\.|Tensor\.zeros"
        r"|\.(tensor|buffer)\b"
    )

    def visit_Module(self, node: cst.Module) -> None:
        """Find parameters, which must not be asked for their truth, and loop variables."""
        self.parameters: set[str] = set()
        self.loops = {
            found.target.value  # type: ignore[attr-defined]
            for found in m.findall(node, m.CompFor(target=m.Name()))
        }
        pattern = m.Call(func=m.Attribute(value=m.Name("Tensor"), attr=m.Name("zeros")))
        for assign in m.findall(node, m.Assign()):
            assert isinstance(assign, cst.Assign)
            target = dotted(assign.targets[0].target)
            if target.startswith("self.") and m.findall(assign.value, pattern):
                self.parameters.add(target)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """An optional Tensor parameter must not be asked for its truth either."""
        for param in [*node.params.params, *node.params.kwonly_params]:
            if param.annotation is not None:
                text = code_of(param.annotation.annotation).replace(" ", "")
                if text in ("Tensor|None", "None|Tensor", "Optional[Tensor]"):
                    self.parameters.add(param.name.value)

    def leave_BooleanOperation(
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BooleanOperation:
        """Both sides of `and` and `or`."""
        left, right = self._asked(updated_node.left), self._asked(updated_node.right)
        return updated_node.with_changes(left=left, right=right)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """`TensorValue(x)`, `x.to(device_ref)`, `x.rebind(s)`, `x.flatten(...)`."""
        func = original_node.func
        if (
            isinstance(func, cst.Name)
            and func.value == "TensorValue"
            and len(updated_node.args) == 1
        ):
            return self._wrapped(original_node, updated_node)
        if not isinstance(func, cst.Attribute) or not isinstance(updated_node.func, cst.Attribute):
            return updated_node
        name, receiver = func.attr.value, updated_node.func.value
        if name == "to" and len(updated_node.args) == 1:
            target = original_node.args[0].value
            if m.matches(target, m.Attribute(attr=m.Name("device"))):
                return updated_node
            self.work.need("max.experimental", "functional", "F")
            self.note(original_node, "safe", "x.to(DeviceRef) becomes F.transfer_to")
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            args = [cst.Arg(receiver, comma=comma), *updated_node.args]
            return updated_node.with_changes(func=cst.parse_expression("F.transfer_to"), args=args)
        if name in _FUNCTIONAL and dotted(func.value) not in ("F", "ops", "np"):
            self.work.need("max.experimental", "functional", "F")
            self.note(original_node, "safe", f"x.{name} becomes F.{name}")
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            first = cst.Arg(
                receiver, comma=comma if updated_node.args else cst.MaybeSentinel.DEFAULT
            )
            args = [first, *updated_node.args]
            return updated_node.with_changes(func=cst.parse_expression(f"F.{name}"), args=args)
        return updated_node

    def _wrapped(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        inner = updated.args[0].value
        if ".shape" in code_of(inner) or isinstance(inner, cst.Integer):
            self.note(original, "safe", "a dimension as a Tensor")
            return cst.parse_expression(f"Tensor.from_graph_value(TensorValue({code_of(inner)}))")
        self.note(original, "safe", "TensorValue(x): a Tensor needs no conversion")
        return inner

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """`x.type.device` -> `x.device`; `results[0].tensor` -> `results[0]`."""
        if original_node.attr.value in ("tensor", "buffer"):
            value = original_node.value
            if isinstance(value, cst.Subscript) or dotted(value) in self.loops:
                self.note(original_node, "safe", f".{original_node.attr.value}: a Tensor is both")
                return updated_node.value
            return updated_node
        if original_node.attr.value in ("device", "dtype", "shape") and m.matches(
            original_node.value, m.Attribute(attr=m.Name("type"))
        ):
            assert isinstance(updated_node.value, cst.Attribute)
            return updated_node.with_changes(value=updated_node.value.value)
        return updated_node

    def _asked(self, test: cst.BaseExpression) -> cst.BaseExpression:
        if dotted(test) in self.parameters:
            return cst.parse_expression(f"{code_of(test)} is not None")
        return test

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If:
        """`if self.bias:` asks whether there is one."""
        return updated_node.with_changes(test=self._asked(updated_node.test))

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.IfExp:
        """The same in a conditional expression."""
        return updated_node.with_changes(test=self._asked(updated_node.test))
