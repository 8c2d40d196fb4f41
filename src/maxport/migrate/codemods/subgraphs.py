"""Subgraphs: a layer built once and called per repetition, through V3's `as_subgraph`.

V2 builds the subgraph from one layer's representative inputs and calls it with each layer's weight
prefix; V3 wraps each layer under one name and finds the prefix itself.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from maxport.migrate.rewrite import Codemod, code_of, dotted, parse_statements

_BUILT = m.Assign(value=m.Call(func=m.Attribute(attr=m.Name("build_subgraph"))))

HELPER = '''

def subgraph_arguments(values: Sequence[Any]) -> Any:
    """The same arguments over Tensors, which is what a subgraph takes in; the KV cache holds
    graph values."""

    def as_tensor(value: Any) -> Tensor:
        return value if isinstance(value, Tensor) else Tensor.from_graph_value(value)

    return tree.map(as_tensor, values, leaf=(Tensor, Value))
'''


class Subgraphs(Codemod):
    """`g = x.build_subgraph(n, v, p); ops.call(g, ...)` -> `as_subgraph(x, name=n)(*v)`."""

    NAME = "subgraphs"
    TRIGGER = r"build_subgraph"

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        super().__init__(work)
        self.built: dict[str, dict[str, str]] = {}
        self.idle: set[str] = set()
        self.made = False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        """Find what is built here, and the names that only served the calls."""
        for assign in m.findall(node, _BUILT):
            assert isinstance(assign, cst.Assign) and isinstance(assign.value, cst.Call)
            assert isinstance(assign.value.func, cst.Attribute)
            order = ("name", "inputs", "weight_prefix")
            given = {
                (arg.keyword.value if arg.keyword else order[index]): code_of(arg.value)
                for index, arg in enumerate(assign.value.args)
            }
            given["layer"] = code_of(assign.value.func.value)
            self.built[code_of(assign.targets[0].target)] = given
        if self.built:
            self.idle = self._idle(node)

    def _idle(self, node: cst.FunctionDef) -> set[str]:
        """Names read by the calls and nothing else: the subgraph's holder, the flat arguments."""
        calls = [c for c in m.findall(node, m.Call()) if self._called(c)]
        gone = [*calls, *m.findall(node, _BUILT)]
        holders = {target.split("[")[0] for target in self.built}
        starred = {dotted(arg.value) for call in calls for arg in call.args if arg.star}
        found = set()
        for name in holders | starred:
            everywhere = len(m.findall(node, m.Name(name)))
            here = sum(len(m.findall(part, m.Name(name))) for part in gone)
            tests = sum(len(m.findall(n, m.Name(name))) for n in self._tests(node))
            if everywhere - here - tests == 1:  # its own binding
                found.add(name)
        return found

    def _tests(self, node: cst.FunctionDef) -> list[cst.BaseExpression]:
        """Conditions of the blocks that do nothing but build."""
        return [
            found.test
            for found in m.findall(node, m.If(body=m.IndentedBlock([m.SimpleStatementLine()])))
            if m.findall(found.body, _BUILT)
        ]

    def _called(self, node: cst.Call) -> dict[str, str] | None:
        """What was built, where `node` is `ops.call` of it."""
        head, _, rest = dotted(node.func).partition(".")
        if rest != "call" or self.work.resolve(head).dotted != "max.graph.ops" or not node.args:
            return None
        return self.built.get(code_of(node.args[0].value))

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Forget what belonged to the function."""
        self.built, self.idle = {}, set()
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Drop the building, and what only served it."""
        statement = original_node.body[0]
        if m.matches(statement, _BUILT):
            self.note(original_node, "safe", "build_subgraph: as_subgraph builds it when called")
            return cst.RemoveFromParent()
        if isinstance(statement, cst.Assign | cst.AnnAssign):
            target = (
                statement.targets[0].target
                if isinstance(statement, cst.Assign)
                else statement.target
            )
            if dotted(target) in self.idle:
                return cst.RemoveFromParent()
        return updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If | cst.RemovalSentinel:
        """A block that only built a subgraph goes with it."""
        emptied = isinstance(updated_node.body, cst.IndentedBlock) and not updated_node.body.body
        return cst.RemoveFromParent() if emptied and updated_node.orelse is None else updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Call the layer as a subgraph; like V2's call, it gives the results flat."""
        given = self._called(original_node)
        if given is None:
            return updated_node
        self.work.need("max.experimental.nn", "as_subgraph")
        self.work.need("max", "tree")
        self.note(original_node, "safe", "the layer is called through as_subgraph")
        layer, name, inputs = given["layer"], given["name"], given["inputs"]
        for module, needed in (
            ("typing", "Any"),
            ("collections.abc", "Sequence"),
            ("max.experimental.tensor", "Tensor"),
            ("max.graph", "Value"),
        ):
            self.work.need(module, needed)
        self.made = True
        call = f"as_subgraph({layer}, name={name})(*subgraph_arguments({inputs}))"
        return cst.parse_expression(f"tree.leaves({call}, leaf=Tensor)")

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Add the helper that the calls use, before the first definition."""
        if not self.made:
            return updated_node
        body = list(updated_node.body)
        at = next(i for i, n in enumerate(body) if isinstance(n, cst.ClassDef | cst.FunctionDef))
        return updated_node.with_changes(body=[*body[:at], *parse_statements(HELPER), *body[at:]])
