"""arch.py: what V2 registers, and the same registered for ModuleV3 under the suffixed name."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import libcst as cst

from maxport.migrate.registered import Registration
from maxport.migrate.rewrite import keyword
from maxport.migrate.sources import absolute_import

if TYPE_CHECKING:
    from maxport.migrate.pipeline import Plumbing
    from maxport.migrate.plan import Plan

SUFFIX = "_ModuleV3"


def rewritten_arch(plan: Plan, first: Registration, batching: str, made: Plumbing) -> str:
    """The V2 arch.py with ModuleV3 names, classes and capabilities."""
    source = plan.kinds.sources.module(first.module)
    assert source is not None
    tree = cst.parse_module(source.text)
    tree = tree.visit(_Arch(plan, first, batching, made))
    return str(tree.code)


class _Arch(cst.CSTTransformer):  # type: ignore[misc]
    """Rewrite the registration calls and their imports."""

    def __init__(self, plan: Plan, first: Registration, batching: str, made: Plumbing) -> None:
        super().__init__()
        self.plan, self.first, self.batching, self.made = plan, first, batching, made

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if not (
            isinstance(original_node.func, cst.Name)
            and original_node.func.value.endswith("Architecture")
        ):
            return updated_node
        args: list[cst.Arg] = []
        for arg in updated_node.args:
            name = arg.keyword.value if arg.keyword else ""
            if name == "name" and isinstance(arg.value, cst.SimpleString):
                text = arg.value.evaluated_value
                arg = arg.with_changes(value=cst.SimpleString(f'"{text}{SUFFIX}"'))
            elif name == "batching":
                arg = arg.with_changes(value=cst.Name(self.batching))
            elif name == "multi_gpu_supported" and not self.plan.parallel:
                self._note("review", "several devices: not in this variant")
                arg = arg.with_changes(value=cst.Name("False"))
            elif name == "cascade_pipeline_factory":
                self._note(
                    "review", "cascade_pipeline_factory dropped, as in MAX's own V3 variants"
                )
                continue
            args.append(arg)
        inner, last = updated_node.args[0].comma, updated_node.args[-1].comma
        present = {a.keyword.value for a in args if a.keyword}
        for name in ("supports_overlap_scheduler", "supports_device_graph_capture"):
            if name not in present and "memory_planner" in present:
                args.append(keyword(name, cst.Name("False")))
        args = [a.with_changes(comma=inner) for a in args[:-1]] + [
            args[-1].with_changes(comma=last)
        ]
        self._note("safe", f"registered as {self.first.name}{SUFFIX}")
        return updated_node.with_changes(args=args)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.FlattenSentinel | cst.RemovalSentinel:  # type: ignore[type-arg]
        if isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        kept = []
        for alias in updated_node.names:
            bound = alias.evaluated_alias or alias.evaluated_name
            if bound not in (self.first.pipeline.name, self.first.batching) and (
                not bound.endswith("BatchProcessor")
            ):
                kept.append(alias)
        if not kept:
            return cst.RemoveFromParent()
        kept[-1] = kept[-1].with_changes(comma=updated_node.names[-1].comma)
        updated_node = updated_node.with_changes(names=kept)
        if not original_node.relative:
            return updated_node
        source = self.plan.kinds.sources.module(self.first.module)
        assert source is not None
        text = cst.Module([]).code_for_node(original_node.module) if original_node.module else None
        module = absolute_import(source, ast.ImportFrom(text, [], len(original_node.relative)))
        place = self.plan.place_for_top(module)
        made = cst.parse_statement(f"from {place} import x")
        template = made.body[0]  # type: ignore[union-attr]
        return updated_node.with_changes(module=template.module, relative=template.relative)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        lines = (
            f"from .batch_processor import {self.batching}\n"
            f"from .model import {self.first.pipeline.name}\n"
        )
        body = list(updated_node.body)
        at = 0
        for index, statement in enumerate(body):
            if isinstance(statement, cst.SimpleStatementLine) and isinstance(
                statement.body[0], cst.Import | cst.ImportFrom
            ):
                at = index + 1
        extra = cst.parse_module(lines).body
        return updated_node.with_changes(body=[*body[:at], *extra, *body[at:]])

    def _note(self, level: str, what: str) -> None:
        self.made.note("arch.py", self.first.line, level, what)
