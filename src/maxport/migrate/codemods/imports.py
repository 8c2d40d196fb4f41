"""Imports: last, because it settles what the other codemods left.

Every imported name that is still used goes where its definition is now: V3's own class, a
carried-over file of this package, a bridge, or the same place as before, spelled absolutely when it
lies outside the package. Names no longer used are dropped.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from maxport.migrate import api
from maxport.migrate.rewrite import Codemod, FileWork, parse_statements
from maxport.migrate.sources import Definition, absolute_import

KERNELS_V3 = "max.experimental.nn.common_layers.functional_kernels"


class Imports(Codemod):
    """Settle imports and bridge functions over graph values."""

    NAME = "imports"

    def __init__(self, work: FileWork) -> None:
        super().__init__(work)
        self.bridges: dict[str, tuple[str, str]] = {}
        self.used: set[str] = set()

    def visit_Module(self, node: cst.Module) -> None:
        """Collect the names in use."""
        collector = _Names()
        node.visit(collector)
        self.used = collector.found
        self.local = collector.defined

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        """Keep what stays, hand the rest to `needs` and `bridges`."""
        if isinstance(original_node.names, cst.ImportStar):
            return updated_node
        module = self._module(original_node)
        if module == "__future__":
            return updated_node
        kept = []
        for alias in original_node.names:
            name = alias.evaluated_name
            bound = alias.evaluated_alias or name
            wanted = self.work.facts.get("keep_unused") or bound in self.used
            if wanted and self._stays(module, name, bound):
                kept.append(alias)
        if not kept:
            return cst.RemoveFromParent()
        moved = self._place(module)
        changed = len(kept) != len(original_node.names)
        if changed:
            kept[-1] = kept[-1].with_changes(comma=original_node.names[-1].comma)
            updated_node = updated_node.with_changes(names=kept)
        elsewhere = moved != module or (original_node.relative and not moved.startswith("."))
        if elsewhere and moved != self._spelled(original_node):
            self.note(original_node, "safe", f"imported from {moved}")
            updated_node = _from(updated_node, moved)
        return updated_node

    def _spelled(self, node: cst.ImportFrom) -> str:
        dots = "." * len(node.relative)
        return dots + (cst.Module([]).code_for_node(node.module) if node.module else "")

    def _module(self, node: cst.ImportFrom) -> str:
        source = self.work.sources.module(self.work.module)
        text = cst.Module([]).code_for_node(node.module) if node.module else None
        if source is None or not node.relative:
            return text or ""
        import ast

        return absolute_import(source, ast.ImportFrom(text, [], len(node.relative)))

    def _place(self, module: str) -> str:
        """Where a module kept as it is is imported from."""
        plan = self.work.plan
        if module in plan.closure.carried:
            return module  # what is not carried over stays where it was
        if module in plan.places and self.work.module in plan.places:
            return plan.relative(self.work.module, module)
        inside = module == plan.target.package or module.startswith(plan.target.package + ".")
        if inside and self.work.module in plan.places and not self.work.carried:
            depth = len(plan.folder_of(self.work.module)) + 1
            return "." * depth + module.removeprefix(plan.target.package).strip(".")
        return module

    def _stays(self, module: str, name: str, bound: str) -> bool:
        """True when the import stays; else what replaces it has been arranged."""
        plan = self.work.plan
        found = self.work.sources.resolve(module, name)
        kind = self.work.kind(found)
        if found.dotted in plan.closure.native:
            self._native(found)
            return False
        if kind in ("root", "container"):
            return self._replaced(kind)
        if kind == "function":
            self.work.need(*api.FUNCTIONS[found.dotted])
            return False
        if kind == "bridge" and not _looks_like_class(found.name):
            self.bridges[bound] = (found.module, found.name)
            return False
        if kind == "layer" and found.module in plan.places:
            target = plan.relative(self.work.module, found.module)
            self.work.need(target, found.name, bound if bound != found.name else "")
            return False
        return True

    def _native(self, found: Definition) -> None:
        """The V3 class of the same name, where annotations still say it."""
        option = api.PINS[found.dotted][0]
        if option.name in self.used:
            self.work.need(option.module, option.name)

    def _replaced(self, kind: str) -> bool:
        if kind == "root":
            self.work.need("max.experimental.nn", "Module")
        else:
            self.work.need("max.experimental.nn.sequential", "ModuleList")
        return False

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Add what is needed after the last import, then the bridges."""
        self._missing()
        lines = [self._line(*need) for need in sorted(self.work.needs) if self._wanted(need)]
        wrapped = []
        for bound, (module, name) in sorted(self.bridges.items()):
            if module == "max.nn.kernels" and name in api.shipped_kernels() and bound == name:
                lines.append(f"from {KERNELS_V3} import {name}")
                self.add(1, "safe", f"{name}: MAX's own V3 wrapper")
                continue
            lines.append(f"from {module} import {name} as _{bound}")
            wrapped.append(f"{bound} = F.functional(_{bound})")
            self.add(1, "safe", f"{name} bridged with F.functional")
        if wrapped and "from max.experimental import functional as F" not in lines:
            lines.insert(0, "from max.experimental import functional as F")
        body = list(updated_node.body)
        at = 0
        for index, statement in enumerate(body):
            text = m.SimpleStatementLine([m.Expr(m.SimpleString() | m.ConcatenatedString())])
            imported = m.matches(statement, m.SimpleStatementLine([m.ImportFrom() | m.Import()]))
            if imported or (index == 0 and m.matches(statement, text)):
                at = index + 1
        made: list[cst.BaseStatement] = []
        if lines:
            made += parse_statements("\n".join(dict.fromkeys(lines)) + "\n")
        if wrapped:
            text = (
                "\n# Kernels over graph values, callable on Tensors.\n" + "\n".join(wrapped) + "\n"
            )
            made += cst.parse_module(text).body  # type: ignore[arg-type]
            first = cst.parse_module(text)
            made[-len(wrapped)] = made[-len(wrapped)].with_changes(  # type: ignore[attr-defined]
                leading_lines=[*first.header, *made[-len(wrapped)].leading_lines]  # type: ignore[attr-defined]
            )
        return updated_node.with_changes(body=[*body[:at], *made, *body[at:]])

    def _wanted(self, need: tuple[str, str, str]) -> bool:
        _, name, asname = need
        bound = asname or name
        return bound in self.used or (bound == "F" and bool(self.bridges))

    @staticmethod
    def _line(module: str, name: str, asname: str) -> str:
        return f"from {module} import {name}" + (f" as {asname}" if asname else "")

    def _missing(self) -> None:
        """Names of the V2 file that the carried slice uses but does not hold."""
        source = self.work.sources.module(self.work.module)
        if source is None or not self.work.carried:
            return
        top = source.classes.keys() | source.functions.keys() | source.constants.keys()
        for name in sorted((self.used & top) - self.local):
            found = Definition(source.name, name)
            if found.dotted in self.work.plan.closure.native:
                self._native(found)
                continue
            if self.work.kind(found) == "bridge":
                self.bridges[name] = (source.name, name)
            else:
                self.work.need(source.name, name)


def _looks_like_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _from(node: cst.ImportFrom, place: str) -> cst.ImportFrom:
    names = node.names
    made = cst.parse_statement(f"from {place} import x")
    assert isinstance(made, cst.SimpleStatementLine)
    template = made.body[0]
    assert isinstance(template, cst.ImportFrom)
    return node.with_changes(module=template.module, relative=template.relative, names=names)


class _Names(cst.CSTVisitor):  # type: ignore[misc]
    """Names read anywhere outside import statements, and names bound at module level."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.defined: set[str] = set()

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.found.add(node.value)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        text = node.evaluated_value
        if isinstance(text, str) and text.isidentifier():
            self.found.add(text)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.defined.add(node.name.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.defined.add(node.name.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        if isinstance(node.target, cst.Name):
            self.defined.add(node.target.value)
