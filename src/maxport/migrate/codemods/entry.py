"""Graph entry: V2's `trace` override becomes V3's `forward` over Tensors.

V2 adapts flat graph inputs to `__call__` in a function nested in `trace`; V3's root module takes
the flat inputs itself. The nested function's body moves into `forward`, in V3's input order
(tokens, return_n_logits, input_row_offsets, then the KV cache), and its result is named as
`ModuleV3Outputs`.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from maxport.migrate.parallel import HELPERS
from maxport.migrate.rewrite import Codemod, code_of, dotted, parse_statements

ORDER = ("tokens", "return_n_logits", "input_row_offsets")
GONE = ("input_tree", "input_types")

OUTPUTS = '''
def named_outputs(values: tuple[Tensor, ...]) -> ModuleV3Outputs:
    """Names a decoder's outputs: last logits, then all logits with offsets, then hidden states.

    Raises:
        ValueError: more outputs than `ModuleV3Outputs` has names for.
    """
    last, *rest = values
    hidden = rest.pop() if len(rest) % 2 else None
    if len(rest) > 2:
        raise ValueError(f"{len(values)} outputs; ModuleV3Outputs names four")
    logits, offsets = rest if rest else (None, None)
    return ModuleV3Outputs(
        next_token_logits=last,
        logits=logits,
        logit_offsets=offsets,
        hidden_states=hidden,
    )
'''


class Entry(Codemod):
    """Replace `trace` by `forward`; drop the methods that described V2's graph inputs."""

    NAME = "entry"
    TRIGGER = r"def trace"

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        super().__init__(work)
        self.made = False

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.BaseStatement:
        """Rewrite classes that override `trace`."""
        methods = {n.name.value: n for n in _methods(original_node)}
        trace = methods.get("trace")
        nested = _nested(trace) if trace is not None else None
        if trace is None or nested is None:
            return updated_node
        own_call = "__call__" in methods
        body: list[cst.BaseStatement] = []
        for item in updated_node.body.body:
            name = item.name.value if isinstance(item, cst.FunctionDef) else ""
            if name == "trace" and isinstance(item, cst.FunctionDef):
                body.append(self._forward(item, own_call))
            elif name == "__call__" and isinstance(item, cst.FunctionDef):
                body.append(item.with_changes(name=cst.Name("run")))
            elif name not in GONE:
                body.append(item)  # type: ignore[arg-type]
        for name in GONE:
            if name in methods:
                self.note(
                    methods[name], "safe", f"{name} dropped: the batch processor names inputs"
                )
        self.note(trace, "safe", "trace becomes forward over Tensors, in V3's input order")
        self.made = True
        self.work.facts["root"] = original_node.name.value
        self.work.need("max.pipelines.lib", "ModuleV3Outputs")
        self.work.need("max.experimental.tensor", "Tensor")
        return updated_node.with_changes(body=updated_node.body.with_changes(body=body))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Add the helper that names the outputs, before the first class."""
        if not self.made:
            return updated_node
        body = list(updated_node.body)
        at = next(i for i, n in enumerate(body) if isinstance(n, cst.ClassDef | cst.FunctionDef))
        helper = cst.parse_module(OUTPUTS).body
        blank = [cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)]
        first = helper[0].with_changes(leading_lines=blank)
        return updated_node.with_changes(body=[*body[:at], first, *body[at:]])

    def _devices(self, before: list[cst.BaseStatement]) -> tuple[str, str]:
        """(name, devices) of `name = len(devices)`, in a package that runs on several devices."""
        if not self.work.plan.parallel:
            return "", ""
        for statement in before:
            pattern = m.Assign(value=m.Call(func=m.Name("len"), args=[m.Arg()]))
            for found in m.findall(statement, pattern):
                assert isinstance(found, cst.Assign) and isinstance(found.value, cst.Call)
                depth = len(self.work.plan.folder_of(self.work.module)) + 1
                self.work.need("." * depth + HELPERS, "broadcast")
                self.work.plan.extras.add(HELPERS)
                return dotted(found.targets[0].target), code_of(found.value.args[0].value)
        return "", ""

    def _forward(self, trace: cst.FunctionDef, own_call: bool) -> cst.FunctionDef:
        nested = _nested(trace)
        assert nested is not None
        before = [s for s in _statements(trace) if s is not nested][:-1]
        before = [s for s in before if not _is_docstring(s)]
        call = "self.run" if own_call else "super().forward"
        names = [p.name.value for p in nested.params.params]
        star = nested.params.star_arg
        rest = star.name.value if isinstance(star, cst.Param) else "kv_inputs"
        rewritten = nested.visit(_Body(call, self._devices(before)))
        assert isinstance(rewritten, cst.FunctionDef)
        statements = [s for s in _statements(rewritten) if not _is_docstring(s)]
        if not names:
            names, statements = _unpacked(rest, statements)
            rest = "kv_inputs" if rest == "inputs" else rest
        ordered = [n for n in ORDER if n in names] + [n for n in names if n not in ORDER]
        params = "".join(f"        {name}: Tensor,\n" for name in ordered)
        header = (
            f"def forward(\n        self,\n{params}        *{rest}: Tensor,\n"
            "    ) -> ModuleV3Outputs:\n"
            '        """Computes logits from the flat graph inputs; the KV cache comes last."""\n'
            "        pass\n"
        )
        made = cst.parse_module("class _:\n    " + header).body[0]
        assert isinstance(made, cst.ClassDef)
        function = made.body.body[0]
        assert isinstance(function, cst.FunctionDef)
        lines = [function.body.body[0], *before, *statements]
        block = function.body.with_changes(body=lines)
        return function.with_changes(
            body=block, leading_lines=trace.leading_lines, lines_after_decorators=()
        )


class _Body(cst.CSTTransformer):  # type: ignore[misc]
    """The nested function's body over Tensors instead of graph values.

    Args:
        call: What `self(...)` becomes.
        devices: (name of their number, the devices) where the package runs on several.
    """

    def __init__(self, call: str, devices: tuple[str, str] = ("", "")) -> None:
        super().__init__()
        self.call = call
        self.count, self.devices = devices
        self.signals: str | None = None
        self.copied = False

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        if m.matches(original_node.func, m.Name("self")):
            return updated_node.with_changes(func=cst.parse_expression(self.call))
        name = dotted(original_node.func)
        if name.split(".")[-1].startswith("unflatten_"):
            args = [a.with_changes(value=_graph_values(a.value)) for a in updated_node.args]
            return updated_node.with_changes(args=args)
        return updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        if original_node.attr.value in ("tensor", "buffer"):
            return updated_node.value
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """`return x` -> `outputs = x; return named_outputs(outputs)`."""
        statement = updated_node.body[0]
        if not (isinstance(statement, cst.Return) and statement.value is not None):
            return updated_node
        target = cst.AssignTarget(cst.Name("outputs"))
        kept = updated_node.with_changes(body=[cst.Assign([target], statement.value)])
        return cst.FlattenSentinel([kept, *parse_statements("return named_outputs(outputs)\n")])

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        """Signal buffers synchronise several devices; on one there are none to take."""
        value = original_node.value
        if self.devices and isinstance(value, cst.ListComp) and self._copies(value):
            self.copied = True
            star = code_of(value.for_in.iter.value)  # type: ignore[attr-defined]
            made = cst.parse_expression(f"broadcast({star}[0], {self.devices})")
            return updated_node.with_changes(value=made)
        signals = "signal" in code_of(original_node.targets[0].target)
        if (
            signals
            and isinstance(value, cst.ListComp)
            and m.matches(value.elt, m.Attribute(attr=m.Name("buffer")))
        ):
            window = value.for_in.iter
            if isinstance(window, cst.Subscript):
                index = window.slice[0].slice
                if isinstance(index, cst.Index):
                    return updated_node
                lower = code_of(index.lower) if index.lower else ""
                upper = code_of(index.upper) if index.upper else ""
                self.signals = f"{upper}>{lower}"
            empty = cst.parse_expression("[]")
            return updated_node.with_changes(value=empty)
        return updated_node

    def leave_Slice(self, original_node: cst.Slice, updated_node: cst.Slice) -> cst.Slice:
        """What followed the signal buffers now starts where they started."""
        if self.signals and original_node.lower and not original_node.upper:
            upper, _, lower = self.signals.partition(">")
            if code_of(original_node.lower) == upper:
                start = cst.parse_expression(lower) if lower else None
                if self.copied and lower == self.count:
                    start = cst.Integer("1")  # V3 takes one copy and makes the others
                return updated_node.with_changes(lower=start)
        return updated_node

    def _copies(self, value: cst.ListComp) -> bool:
        """`[v.tensor for v in args[:n_devices]]`: an input that V2 takes once per device."""
        window = value.for_in.iter
        if not m.matches(value.elt, m.Attribute(attr=m.Name("tensor"))):
            return False
        if not (isinstance(window, cst.Subscript) and isinstance(window.value, cst.Name)):
            return False
        index = window.slice[0].slice
        return (
            isinstance(index, cst.Slice)
            and index.lower is None
            and index.upper is not None
            and code_of(index.upper) == self.count
        )


def _graph_values(value: cst.BaseExpression) -> cst.BaseExpression:
    """`iter(values)` -> an iterator over the Tensors' graph values, which the cache takes."""
    if m.matches(value, m.Call(func=m.Name("iter"))):
        assert isinstance(value, cst.Call)
        inner = code_of(value.args[0].value)
        return cst.parse_expression(f"iter(value._graph_value for value in {inner})")
    return value


def _unpacked(
    star: str, statements: list[cst.BaseStatement]
) -> tuple[list[str], list[cst.BaseStatement]]:
    """Parameter names of `def forward(*inputs)` from `a, b, *rest = inputs` in its body, or from
    `a = next(it)` at its head.

    The flat tuple is put together again in V2's order, so that the body may stay as it is.
    """
    taken = _taken(star, statements)
    if taken:
        flat = ", ".join([*taken, "*kv_inputs"])
        return taken, [*parse_statements(f"{star} = ({flat})\n"), *statements]
    for statement in reversed(statements):
        found = m.findall(statement, m.Assign(value=m.Name(star)))
        for assign in found:
            assert isinstance(assign, cst.Assign)
            target = assign.targets[0].target
            if isinstance(target, cst.Tuple):
                names = [
                    e.value.value
                    for e in target.elements
                    if isinstance(e, cst.Element) and isinstance(e.value, cst.Name)
                ]
                flat = ", ".join([*names, "*kv_inputs"])
                rebuilt = parse_statements(f"{star} = ({flat})\n")
                return names, [*rebuilt, *statements]
    return [], statements


def _taken(star: str, statements: list[cst.BaseStatement]) -> list[str]:
    """Names bound by `a = next(it)` straight after `it = iter(inputs)`."""
    names: list[str] = []
    iterator = ""
    for statement in statements:
        if not m.matches(statement, m.SimpleStatementLine([m.Assign(value=m.Call())])):
            break
        assign = statement.body[0]
        assert isinstance(assign, cst.Assign) and isinstance(assign.value, cst.Call)
        target, called = dotted(assign.targets[0].target), dotted(assign.value.func)
        given = [dotted(arg.value) for arg in assign.value.args]
        if called == "iter" and given == [star]:
            iterator = target
        elif called == "next" and iterator and given == [iterator]:
            names.append(target)
        else:
            break
    return names


def _methods(node: cst.ClassDef) -> list[cst.FunctionDef]:
    return [item for item in node.body.body if isinstance(item, cst.FunctionDef)]


def _statements(node: cst.FunctionDef) -> list[cst.BaseStatement]:
    return [s for s in node.body.body if isinstance(s, cst.BaseStatement)]


def _nested(trace: cst.FunctionDef) -> cst.FunctionDef | None:
    """The function that `trace` hands to `Graph`."""
    inner = [s for s in _statements(trace) if isinstance(s, cst.FunctionDef)]
    returned = m.findall(trace, m.Return(value=m.Call(func=m.Name("Graph"))))
    return inner[0] if len(inner) == 1 and returned else None


def _is_docstring(node: cst.BaseStatement) -> bool:
    return bool(m.matches(node, m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString())])))
