"""Module surface: base classes, `forward`, Tensor annotations, names V3's Module reserves."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from maxport.migrate.rewrite import Codemod, code_of, dotted

VALUES = {"TensorValue", "BufferValue", "TensorValueLike", "Weight", "Value"}
# Attributes that V3's Module defines as properties without a setter.
RESERVED = {"parameters", "children", "descendants", "local_parameters"}
# Names that may stand in `Module[[...], ...]`, which is evaluated when the class is made.
_EVALUATED = {"Tensor", "int", "float", "bool", "str", "None", "tuple", "list", "Any"}


class Surface(Codemod):
    """`Module` with its call signature, `__call__` -> `forward`, graph values -> Tensor."""

    NAME = "surface"

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        super().__init__(work)
        self.stack: list[bool] = []
        self.depth_annotation = 0
        self.copies: list[cst.BaseExpression] = []

    # --- classes -----------------------------------------------------------------------------

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        """Note whether we are inside a V2 layer."""
        if not self.stack:
            assigns = m.findall(node, m.Assign() | m.AnnAssign())
            targets = (dotted(_target(found)) for found in assigns)
            self.stored = {t.removeprefix("self.") for t in targets} & RESERVED
        self.stack.append(self.work.is_layer(node.name.value) if len(self.stack) == 0 else False)

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        """Type the Module base and drop the V2 protocols."""
        layer = self.stack.pop()
        if not layer or self.stack:
            return updated_node
        bases = []
        # A protocol asks for what layers on several devices keep.
        asks = self.work.plan.parallel and any(
            dotted(arg.value) == "Protocol" for arg in updated_node.bases
        )
        for arg in updated_node.bases:
            name = dotted(arg.value)
            found = self.work.resolve(name) if name else None
            shardable = found is not None and found.name in ("Shardable", "ShardableCallable")
            if shardable and not asks:
                self.note(original_node, "review", f"{name} dropped: V3 shards by placement")
            elif found is not None and self.work.kind(found) == "root":
                bases.append(arg.with_changes(value=self._module(original_node, updated_node)))
            else:
                bases.append(arg)
        if bases:
            bases[-1] = bases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(bases=bases)

    def _module(self, original: cst.ClassDef, node: cst.ClassDef) -> cst.BaseExpression:
        self.work.need("max.experimental.nn", "Module")
        call = next((f for f in _functions(node) if f.name.value == "forward"), None)
        if call is None:
            self.note(original, "safe", "Module from max.experimental.nn")
            self.work.need("typing", "Any")
            return cst.parse_expression("Module[..., Any]")
        self.note(original, "safe", "Module takes forward's signature")
        result = self._evaluated(call.returns)
        params = call.params
        plain = not (params.star_arg is not cst.MaybeSentinel.DEFAULT or params.kwonly_params)
        plain = plain and params.star_kwarg is None
        plain = plain and not any(p.default for p in params.params)
        if not plain:
            return cst.parse_expression(f"Module[..., {result}]")
        types = ", ".join(self._evaluated(p.annotation) for p in params.params[1:])
        return cst.parse_expression(f"Module[[{types}], {result}]")

    def _evaluated(self, annotation: cst.Annotation | None) -> str:
        """Text of an annotation if all its names exist when the class is made, else Any."""
        if annotation is not None:
            names = {n.value for n in m.findall(annotation, m.Name()) if isinstance(n, cst.Name)}
            if names <= _EVALUATED:
                return code_of(annotation.annotation)
        self.work.need("typing", "Any")
        return "Any"

    # --- methods and attributes --------------------------------------------------------------

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """`__call__` -> `forward`; the transparent-name property under V3's name."""
        if not (self.stack and self.stack[-1]):
            return updated_node
        name = original_node.name.value
        if name == "__call__":
            self.note(original_node, "safe", "__call__ becomes forward")
            return updated_node.with_changes(name=cst.Name("forward"))
        if name == "_omit_module_attr_name":
            self.note(original_node, "safe", "_omit_module_attr_name becomes name_transparent")
            # V3 declares a plain attribute; overriding it with a property is sound, mypy disagrees.
            comment = cst.TrailingWhitespace(
                cst.SimpleWhitespace("  "), cst.Comment("# type: ignore[override]")
            )
            body = updated_node.body
            if isinstance(body, cst.IndentedBlock):
                updated_node = updated_node.with_changes(body=body.with_changes(header=comment))
            return updated_node.with_changes(name=cst.Name("name_transparent"))
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.Attribute:
        """`x.__call__` -> `x.forward`; `self.device` -> `self.device_ref`."""
        name = original_node.attr.value
        if name == "__call__":
            return updated_node.with_changes(attr=cst.Name("forward"))
        if name == "_omit_module_attr_name":
            return updated_node.with_changes(attr=cst.Name("name_transparent"))
        inside = bool(self.stack and self.stack[-1])
        mine = m.matches(original_node.value, m.Name("self"))
        if inside and mine and name == "device":
            self.note(original_node, "safe", "self.device becomes device_ref: V3 reserves device")
            return updated_node.with_changes(attr=cst.Name("device_ref"))
        if inside and mine and name in self.stored:
            self.note(original_node, "manual", f"V3's Module reserves {name}; rename the attribute")
        return updated_node

    def leave_AnnAssign(
        self, original_node: cst.AnnAssign, updated_node: cst.AnnAssign
    ) -> cst.AnnAssign:
        """A class-level `device: DeviceRef` follows its attribute's new name."""
        inside = bool(self.stack and self.stack[-1])
        if inside and m.matches(original_node.target, m.Name("device")):
            return updated_node.with_changes(target=cst.Name("device_ref"))
        return updated_node

    def visit_Assign(self, node: cst.Assign) -> None:
        """Note a list of per-device copies that is copied where it is kept."""
        self._note_copy(node.targets[0].target, node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        """The same with a type."""
        self._note_copy(node.target, node.value)

    def _note_copy(self, target: cst.CSTNode, value: cst.BaseExpression | None) -> None:
        shard = m.Call(func=m.Attribute(attr=m.Name("shard")))
        if m.matches(target, m.Attribute(value=m.Name("self"))) and m.matches(
            value, m.Call(func=m.Name("list"), args=[m.Arg(shard)])
        ):
            self.copies.append(value)  # type: ignore[arg-type]

    # --- annotations -------------------------------------------------------------------------

    def leave_Annotation(
        self, original_node: cst.Annotation, updated_node: cst.Annotation
    ) -> cst.Annotation:
        """Graph values become Tensors in annotations."""
        changed = updated_node.visit(_ToTensor(self.work))
        if changed is not updated_node and not changed.deep_equals(updated_node):  # type: ignore[union-attr]
            self.note(original_node, "safe", f"{code_of(original_node.annotation)} becomes Tensor")
        return changed  # type: ignore[return-value]

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """`isinstance(x, TensorValue)` asks for a Tensor now; `list(x.shard(d))` is one already."""
        if any(original_node is copied for copied in self.copies):
            self.note(original_node, "safe", "shard's result is a list")
            return updated_node.args[0].value
        if m.matches(original_node.func, m.Name("isinstance")) and len(updated_node.args) == 2:
            second = updated_node.args[1].visit(_ToTensor(self.work))
            return updated_node.with_changes(args=[updated_node.args[0], second])
        return updated_node


class _ToTensor(cst.CSTTransformer):  # type: ignore[misc]
    """Graph-value names -> Tensor, `Value[Any]` included, `A | A` folded."""

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.work = work

    def _is_value(self, node: cst.BaseExpression) -> bool:
        if not (isinstance(node, cst.Name) and node.value in VALUES):
            return False
        return bool(self.work.resolve(node.value).module.startswith("max.graph"))

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        if original_node.value == "Layer" and self.work.kind(self.work.resolve("Layer")) == "root":
            return updated_node.with_changes(value="Module")
        if not self._is_value(original_node):
            return updated_node
        self.work.need("max.experimental.tensor", "Tensor")
        return updated_node.with_changes(value="Tensor")

    def leave_Subscript(
        self, original_node: cst.Subscript, updated_node: cst.Subscript
    ) -> cst.BaseExpression:
        return updated_node.value if self._is_value(original_node.value) else updated_node

    def leave_BinaryOperation(
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        same = updated_node.left.deep_equals(updated_node.right)
        return updated_node.left if same else updated_node


def _target(node: cst.CSTNode) -> cst.BaseExpression | None:
    if isinstance(node, cst.Assign):
        return node.targets[0].target
    return node.target if isinstance(node, cst.AnnAssign) else None


def _functions(node: cst.ClassDef) -> Sequence[cst.FunctionDef]:
    return [item for item in node.body.body if isinstance(item, cst.FunctionDef)]
