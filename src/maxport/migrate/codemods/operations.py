"""Operations: `ops.x` becomes `F.x`; what F lacks is bridged with `F.functional`."""

from __future__ import annotations

import libcst as cst

from maxport.migrate import api
from maxport.migrate.rewrite import Codemod, dotted

_GRAPH_OPS = "max.graph.ops"
# Keywords with another name in F (26.7).
_RENAMED = {
    "where": {"condition": "cond"},
    "split": {"split_sizes": "split_size_or_sections"},
    "transfer_to": {"x": "t", "device": "target"},
}


class Operations(Codemod):
    """Graph ops over Tensors."""

    NAME = "operations"
    TRIGGER = r"\bops\b"

    def _op(self, node: cst.BaseExpression) -> str:
        """Name of the graph op that `ops.x` (or `ops.x.y`) means; empty for anything else."""
        name = dotted(node)
        head, _, rest = name.partition(".")
        if not rest:
            return ""
        found = self.work.resolve(head)
        return rest if found.dotted == _GRAPH_OPS else ""

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        """An op chain is one unit."""
        return not self._op(node)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rewrite the reference itself, called or passed on."""
        op = self._op(original_node)
        if not op:
            return updated_node
        self.work.need("max.experimental", "functional", "F")
        if op in api.functional_names():
            self.note(original_node, "safe", f"ops.{op} becomes F.{op}")
            return cst.parse_expression(f"F.{op}")
        self.note(original_node, "review", f"ops.{op} bridged: F has no {op}")
        return cst.parse_expression(f"F.functional({dotted(original_node)})")

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Rename keywords that F spells differently."""
        renamed = _RENAMED.get(self._op(original_node.func), {})
        args = [
            a.with_changes(keyword=cst.Name(renamed[a.keyword.value]))
            if a.keyword and a.keyword.value in renamed
            else a
            for a in updated_node.args
        ]
        return updated_node.with_changes(args=args)
