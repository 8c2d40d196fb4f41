"""Weights: `Weight(...)` becomes a Tensor parameter; shared weights are tied in `forward`."""

from __future__ import annotations

import ast

import libcst as cst
import libcst.matchers as m

from maxport.migrate.classify import bases_of
from maxport.migrate.rewrite import (
    Codemod,
    code_of,
    dotted,
    keyword,
    manual_block,
    parse_statements,
    relaid,
)

_GGUF = "GGUF-encoded weights have no ModuleV3 counterpart"
_PARAMS = (
    "name",
    "dtype",
    "shape",
    "device",
    "quantization_encoding",
    "align",
    "sharding_strategy",
)


class Weights(Codemod):
    """Parameters are Tensors named by their attribute."""

    NAME = "weights"
    TRIGGER = r"Weight\b|quantization_encoding|shared_weight"

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        super().__init__(work)
        self.attribute = ""
        self.encoded = False
        self.blocked = ""
        self.ties: list[tuple[str, str]] = []
        self.classes: list[cst.ClassDef] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        """Start collecting ties."""
        self.classes.append(node)
        self.ties = []
        self.names: dict[str, str] = {}

    def visit_Assign(self, node: cst.Assign) -> None:
        """Remember the attribute a Weight is stored under, and a head built on a tied weight."""
        target = dotted(node.targets[0].target)
        pattern = m.Arg(keyword=m.Name("tied_weight"))
        for arg in m.findall(node.value, pattern) if self.classes else ():
            sources = [code_of(n) for n in m.findall(arg, m.Attribute(attr=m.Name("weight")))]
            owners = {source.removesuffix(".weight") for source in sources}
            head = self._path(target)
            origin = self._path(owners.pop()) if len(owners) == 1 else ""
            if head and origin:
                self.ties.append((f"self.{head}.weight", f"self.{origin}.weight"))
        self.attribute = target.removeprefix("self.") if target.startswith("self.") else ""

    def _is_weight(self, node: cst.Call) -> bool:
        name = dotted(node.func)
        found = self.work.resolve(name) if name else None
        return found is not None and found.name == "Weight" and found.module.startswith("max.graph")

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """`Weight(name, dtype, shape, device)` -> `Tensor.zeros(shape, dtype=, device=)`."""
        if not self._is_weight(original_node):
            return updated_node
        named = {
            (a.keyword.value if a.keyword else _PARAMS[i]): a.value
            for i, a in enumerate(updated_node.args)
        }
        level, what = self._named(named)
        encoding = named.get("quantization_encoding")
        if encoding is not None and code_of(encoding) != "None":
            self.encoded = True
        args = [cst.Arg(named["shape"])] if "shape" in named else []
        if "dtype" in named:
            args.append(keyword("dtype", named["dtype"]))
        if "device" in named:
            args.append(keyword("device", self._device(named["device"])))
        self.work.need("max.experimental.tensor", "Tensor")
        self.note(original_node, level, what)
        if level == "manual":
            self.blocked = what
        return updated_node.with_changes(
            func=cst.parse_expression("Tensor.zeros"), args=relaid(args, updated_node.args)
        )

    def _named(self, named: dict[str, cst.BaseExpression]) -> tuple:  # type: ignore[type-arg]
        """Level and text: does V3's name, the attribute path, equal V2's?"""
        text = code_of(named["name"]) if "name" in named else ""
        tail = text.rsplit(" else ", 1)[-1] if " else " in text else text.split(" or ")[-1]
        try:
            literal = ast.literal_eval(tail)
        except (ValueError, SyntaxError):
            literal = None
        if literal == self.attribute and tail == text:
            return "safe", "Weight becomes a Tensor parameter of the same name"
        if isinstance(literal, str) and self.attribute.isidentifier() and tail == text:
            self.names[self.attribute] = literal
            return "safe", f"Weight becomes a Tensor parameter that keeps its name {literal}"
        if literal == self.attribute:
            return "review", "Weight becomes a Tensor parameter; a name= given here is not used"
        return (
            "manual",
            f"V2 names this weight {text or 'nothing'}, V3 {self.attribute or 'nothing'}",
        )

    def _device(self, value: cst.BaseExpression) -> cst.BaseExpression:
        if code_of(value) == "DeviceRef.CPU()":
            self.work.need("max.driver", "CPU")
            return cst.parse_expression("CPU()")
        return cst.parse_expression(f"{code_of(value)}.to_device()")

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Start looking for encoded weights in a constructor."""
        if node.name.value == "__init__":
            self.encoded = False

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """A constructor handed a GGUF encoding stops, since V3 cannot hold such weights."""
        params = [*original_node.params.params, *original_node.params.kwonly_params]
        takes = any(p.name.value == "quantization_encoding" for p in params)
        if original_node.name.value != "__init__" or not (self.encoded and takes):
            return updated_node
        self.note(original_node, "manual", f"{_GGUF}: the constructor refuses them")
        inner = list(updated_node.body.body)
        first = 1 if m.matches(inner[0], m.SimpleStatementLine([m.Expr(m.SimpleString())])) else 0
        inner[first:first] = parse_statements(
            "if quantization_encoding is not None:\n"
            f"    # maxport MANUAL (weights): {_GGUF}.\n"
            f'    raise NotImplementedError("maxport: {_GGUF}")\n'
        )
        return updated_node.with_changes(body=updated_node.body.with_changes(body=inner))

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """A Tensor has no GGUF encoding."""
        if original_node.attr.value == "quantization_encoding" and dotted(
            original_node.value
        ).endswith("weight"):
            self.note(original_node, "safe", "no encoding: encoded weights are refused")
            return cst.Name("None")
        return updated_node

    def _renamed(self, node: cst.ClassDef) -> cst.ClassDef:
        """Declare parameter names that differ from their attributes', as V2's `Weight` could."""
        names, self.names = self.names, {}
        if not names or self.classes:
            return node
        depth = len(self.work.plan.folder_of(self.work.module)) + 1
        self.work.need("." * depth + "named_parameters", "NamedParameters")
        self.work.need("typing", "ClassVar")
        self.work.plan.extras.add("named_parameters")
        pairs = "".join(f'    "{a}": "{n}",\n' for a, n in names.items())
        made = parse_statements(f"parameter_names: ClassVar[dict[str, str]] = {{\n{pairs}}}\n")
        body = list(node.body.body)
        first = 1 if m.matches(body[0], m.SimpleStatementLine([m.Expr(m.SimpleString())])) else 0
        body[first:first] = made
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        bases = [cst.Arg(cst.Name("NamedParameters"), comma=comma), *node.bases]
        return node.with_changes(body=node.body.with_changes(body=body), bases=bases)

    # --- shared weights ----------------------------------------------------------------------

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """`head.set_shared_weight("weight", emb.weight)`: the head holds none of its own."""
        if self.blocked:
            reason, self.blocked = self.blocked, ""
            return self._block(original_node, reason)
        pattern = m.Expr(value=m.Call(func=m.Attribute(attr=m.Name("set_shared_weight"))))
        if len(original_node.body) != 1 or not m.matches(original_node.body[0], pattern):
            return updated_node
        call = original_node.body[0].value  # type: ignore[union-attr]
        assert isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute)
        holder, source = dotted(call.func.value), dotted(call.args[1].value)
        attribute = ast.literal_eval(code_of(call.args[0].value))
        if holder == "self":
            made = parse_statements("self.weight = None  # tied by the module that holds both\n")
            self.note(original_node, "safe", "the shared weight is held once and tied in forward")
            return made[0]  # type: ignore[return-value]
        if not self.classes:  # in a function that builds the model
            what = f"{holder} holds no weight of its own; a graph that reads it does not trace"
            self.note(original_node, "review", what)
            shared = code_of(call.args[1].value)
            made = parse_statements(f"{holder}.{attribute} = None  # held by {shared}\n")[0]
            return made.with_changes(leading_lines=updated_node.leading_lines)  # type: ignore[return-value]
        head = self._path(holder)
        owner, _, weight = source.rpartition(".")
        origin = self._path(owner)
        if not head or not origin:
            reason = "cannot tell where the shared weight ends up"
            self.note(original_node, "manual", reason)
            return self._block(original_node, reason)
        self.ties.append((f"self.{head}.{attribute}", f"self.{origin}.{weight}"))
        self.note(original_node, "safe", "the shared weight is held once and tied in forward")
        made = parse_statements(f"{holder}.{attribute} = None  # tied, see tie_weights\n")[0]
        return made.with_changes(leading_lines=updated_node.leading_lines)  # type: ignore[return-value]

    def _block(
        self, node: cst.SimpleStatementLine, reason: str
    ) -> cst.FlattenSentinel[cst.BaseStatement]:
        """A marked block that raises in place of a statement that could not be rewritten."""
        was = code_of(node.with_changes(leading_lines=())).strip().splitlines()
        return cst.FlattenSentinel(manual_block(self.NAME, reason.replace('"', "'"), was))

    def _path(self, local: str) -> str:
        """Attribute path of a local of `__init__` on self, through `super().__init__(k=local)`."""
        if local.startswith("self."):
            return local.removeprefix("self.")
        node = self.classes[-1]
        for assign in m.findall(node, m.Assign(value=m.Name(local))):
            target = dotted(assign.targets[0].target)  # type: ignore[attr-defined]
            if target.startswith("self."):
                return target.removeprefix("self.")
        pattern = m.Call(func=m.Attribute(value=m.Call(m.Name("super")), attr=m.Name("__init__")))
        for call in m.findall(node, pattern):
            for arg in call.args:  # type: ignore[attr-defined]
                if arg.keyword and m.matches(arg.value, m.Name(local)):
                    return self._base_attribute(node.name.value, arg.keyword.value)
        return ""

    def _base_attribute(self, name: str, parameter: str) -> str:
        """Attribute a base class's `__init__` stores `parameter` under."""
        source = self.work.sources.module(self.work.module)
        node = source.classes.get(name) if source else None
        if source is None or node is None:
            return ""
        for base in bases_of(self.work.sources, source, node):
            owner = self.work.sources.module(base.module)
            found = owner.classes.get(base.name) if owner else None
            for item in ast.walk(found) if found else ():
                if isinstance(item, ast.Assign) and ast.unparse(item.value) == parameter:
                    target = ast.unparse(item.targets[0])
                    if target.startswith("self."):
                        return target.removeprefix("self.")
        return ""

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        """Add `tie_weights` and call it first in `forward`."""
        self.classes.pop()
        updated_node = self._renamed(updated_node)
        ties, self.ties = self.ties, []
        body = list(updated_node.body.body)
        at = next((i for i, n in enumerate(body) if _is_forward(n)), None)
        if not ties:
            return updated_node
        if at is None:
            self.note(original_node, "manual", "shared weight, but the class has no forward")
            return updated_node
        lines = ""
        for head, origin in ties:
            lines += f"    if {head} is None:\n        {head} = {origin}\n"
        method = parse_statements(
            "\ndef tie_weights(self) -> None:\n"
            '    """Lets a shared weight, held once, be read where it is used."""\n'
            f"{lines}"
        )
        forward = body[at]
        assert isinstance(forward, cst.FunctionDef)
        inner = list(forward.body.body)
        first = 1 if m.matches(inner[0], m.SimpleStatementLine([m.Expr(m.SimpleString())])) else 0
        inner[first:first] = parse_statements("self.tie_weights()\n")
        body[at] = forward.with_changes(body=forward.body.with_changes(body=inner))
        body[at:at] = method
        return updated_node.with_changes(body=updated_node.body.with_changes(body=body))


def _is_forward(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.FunctionDef) and node.name.value == "forward"
