"""Signal buffers: V2 hands them from the graph's inputs down to every collective, V3 to none.

ModuleV3 adds a signal buffer per device to the graph by itself. So the parameter, the arguments
that fill it and what the documentation says about it go, in all layers of a package at once; see
`parallel.signals_removable` for when that is possible.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import libcst as cst
import libcst.matchers as m

from maxport.migrate.parallel import SIGNALS, collective
from maxport.migrate.rewrite import Codemod, code_of, dotted

_Item = TypeVar("_Item", cst.Arg, cst.Param, cst.BaseElement)
_DOC = re.compile(rf"^( +){SIGNALS}:.*\n(?:\1 +\S.*\n)*", re.MULTILINE)
_BUFFERS = re.compile(r"(?:(?:Sequence|Iterable|list)\[)?BufferValue\]?")


class Signals(Codemod):
    """`layer(x, signal_buffers, kv)` -> `layer(x, kv)`."""

    NAME = "signals"
    TRIGGER = SIGNALS

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        super().__init__(work)
        self.callables = 0

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Drop the parameter and its line in the docstring."""
        params = updated_node.params
        if not any(p.name.value == SIGNALS for p in (*params.params, *params.kwonly_params)):
            return updated_node
        self.note(original_node, "safe", f"{SIGNALS} dropped: ModuleV3 adds them by itself")
        params = params.with_changes(
            params=_without(params.params, _is_signals),
            kwonly_params=_without(params.kwonly_params, _is_signals),
        )
        updated_node = updated_node.with_changes(params=params)
        body = updated_node.body
        first = body.body[0]
        if not m.matches(first, m.SimpleStatementLine([m.Expr(m.SimpleString())])):
            return updated_node
        text = first.body[0].value  # type: ignore[union-attr]
        told = text.with_changes(value=_DOC.sub("", text.value))
        line = first.with_changes(body=[cst.Expr(told)])
        return updated_node.with_changes(body=body.with_changes(body=[line, *body.body[1:]]))

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Drop what binds the name from the graph's inputs."""
        pattern = m.SimpleStatementLine([m.Assign([m.AssignTarget(m.Name(SIGNALS))])])
        return cst.RemoveFromParent() if m.matches(original_node, pattern) else updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Drop the argument; a collective's own is the next codemod's."""
        if collective(self.work.sources, self.work.module, dotted(original_node.func)):
            return updated_node
        return updated_node.with_changes(args=_without(updated_node.args, _is_signals))

    def visit_Subscript(self, node: cst.Subscript) -> None:
        """`Callable[[..., Sequence[BufferValue]], ...]` names its type instead."""
        self.callables += dotted(node.value) == "Callable"

    def leave_Subscript(
        self, original_node: cst.Subscript, updated_node: cst.Subscript
    ) -> cst.Subscript:
        """Leave the annotation."""
        self.callables -= dotted(original_node.value) == "Callable"
        return updated_node

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> cst.List:
        """A list of a layer's arguments."""

        def gone(item: cst.BaseElement) -> bool:
            buffers = self.callables and _BUFFERS.fullmatch(code_of(item.value))
            return bool(buffers) or _is_signals(item)

        return updated_node.with_changes(elements=_without(updated_node.elements, gone))


def _is_signals(item: cst.CSTNode) -> bool:
    """Whether a parameter, argument or element is the signal buffers."""
    if isinstance(item, cst.Param):
        return bool(item.name.value == SIGNALS)
    return dotted(getattr(item, "value", None)) == SIGNALS


def _without(items: Sequence[_Item], gone) -> list[_Item]:  # type: ignore[no-untyped-def]
    """The items that stay; the last one ends as the last one did."""
    kept = [item for item in items if not gone(item)]
    if kept and len(kept) < len(items) and kept[-1] is not items[-1]:
        last = {"comma": items[-1].comma}
        for blank in ("whitespace_after_arg", "whitespace_after_param"):
            if hasattr(kept[-1], blank):
                last[blank] = getattr(items[-1], blank)
        kept[-1] = kept[-1].with_changes(**last)
    return kept
