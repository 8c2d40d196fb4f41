"""Constructors of V2 layers that V3 has too: keywords, ambient dtype and device, defaults."""

from __future__ import annotations

import ast

import libcst as cst

from maxport.migrate import api, closure
from maxport.migrate.rewrite import Codemod, code_of, dotted, keyword, relaid


class Constructors(Codemod):
    """`Linear(a, b, dtype, device, has_bias=True)` -> `Linear(in_dim=a, out_dim=b, bias=True)`."""

    NAME = "constructors"

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Rewrite a call to a class that the closure found replaceable."""
        name = dotted(original_node.func)
        found = self.work.resolve(name) if name else None
        if found is None or found.dotted not in self.work.plan.closure.native:
            return updated_node
        call = ast.parse(code_of(original_node), mode="eval").body
        assert isinstance(call, ast.Call)
        option = closure.choose(self.work.plan.kinds, found.dotted, call)
        if option is None:
            return updated_node
        signature = api.signature_of(self.work.sources, found)
        assert signature is not None
        named: dict[str, cst.Arg] = {}
        for index, arg in enumerate(updated_node.args):
            key = arg.keyword.value if arg.keyword else signature.positional[index]
            named[key] = arg
        kept = {option.renamed.get(k, k): a for k, a in named.items() if self._kept(option, k)}
        for key, text in option.pinned.items():
            if key not in kept:
                kept[key] = cst.Arg(cst.parse_expression(text))
        args = [
            arg.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)
            if index == 0 and option.positional_first
            else keyword(key, arg.value).with_changes(comma=arg.comma)
            for index, (key, arg) in enumerate(kept.items())
        ]
        self.work.need(option.module, option.name)
        dropped = sorted(named.keys() & api.AMBIENT)
        tail = f"; {', '.join(dropped)} from the defaults" if dropped else ""
        self.note(original_node, "safe", f"{name} takes V3's keywords{tail}")
        encoding = named.get("quantization_encoding")
        if encoding is not None and code_of(encoding.value) != "None":
            self.note(original_node, "review", f"{name} holds no GGUF-encoded weights in V3")
        dtype = named.get("dtype")
        if dtype is not None and not _ambient(dtype.value):
            if self.whole is original_node:
                self.fixed = code_of(dtype.value)
            else:
                what = f"{name}'s dtype {code_of(dtype.value)} is the default's in V3"
                self.note(original_node, "review", what)
        return updated_node.with_changes(
            func=cst.Name(option.name), args=relaid(args, updated_node.args)
        )

    @staticmethod
    def _kept(option: api.Equivalent, key: str) -> bool:
        return key not in api.AMBIENT and key not in option.requires

    fixed: str = ""
    whole: cst.BaseExpression | None = None

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        """Note the call that is all of an assignment: it can be built under a dtype of its own."""
        self.whole = getattr(node.body[0], "value", None)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement:
        """A layer with a dtype of its own is built where that dtype is the default."""
        dtype, self.fixed = self.fixed, ""
        if not dtype:
            return updated_node
        self.work.need("max.experimental.tensor", "default_dtype")
        self.note(original_node, "safe", f"built under default_dtype({dtype})")
        header = cst.parse_statement(f"with default_dtype({dtype}):\n    pass\n")
        assert isinstance(header, cst.With)
        block = cst.IndentedBlock([updated_node.with_changes(leading_lines=())])
        return header.with_changes(body=block, leading_lines=updated_node.leading_lines)


def _ambient(value: cst.BaseExpression) -> bool:
    """True for `dtype` and `config.dtype`: the model's own, which V3 has as the default."""
    return dotted(value).rpartition(".")[2] == "dtype"
