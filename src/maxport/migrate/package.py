"""Run the codemods over everything the plan lists and hand back the V3 package's files as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from maxport.migrate.codemods import order_for
from maxport.migrate.codemods.imports import Imports
from maxport.migrate.parallel import HELPERS, HELPERS_TEXT
from maxport.migrate.pipeline import make_pipeline
from maxport.migrate.plan import Plan
from maxport.migrate.rewrite import Change, FileWork, apply
from maxport.migrate.sources import ModuleSource

# Files that `pipeline` writes anew.
_PLUMBING: tuple[tuple[str, ...], ...] = (
    ("model",),
    ("arch",),
    ("batch_processor",),
    ("inputs",),
    (),
)

NAMED_PARAMETERS = '''"""Parameters whose checkpoint name differs from their attribute."""

from __future__ import annotations

from typing import Any, ClassVar


class NamedParameters:
    """Lets a module name a parameter other than by its attribute, dots included.

    Mix in before `Module`. `parameter_names` maps attributes to names; the names are what
    `parameters` yields and what weights are looked up by.
    """

    parameter_names: ClassVar[dict[str, str]] = {}

    def _attribute(self, name: Any) -> Any:
        return next((a for a, n in self.parameter_names.items() if n == name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self._attribute(name), value)

    def __tree_flatten__(self) -> tuple[dict[Any, Any], None]:
        children, meta = super().__tree_flatten__()  # type: ignore[misc]
        names = self.parameter_names
        return {names.get(k, k) if isinstance(k, str) else k: v for k, v in children.items()}, meta

    def __tree_setattr__(self, key: Any, value: Any) -> None:
        super().__tree_setattr__(self._attribute(key), value)  # type: ignore[misc]
'''


@dataclass
class Migrated:
    """The V3 package: path -> text, the rewrites, each file's V2 text, and which files are new."""

    plan: Plan
    files: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    generated: set[str] = field(default_factory=set)


def migrate_graph(plan: Plan) -> Migrated:
    """Rewrite the graph's files: own ones whole, carried ones as slices."""
    result = Migrated(plan)
    carried = plan.closure.carried
    for module, place in plan.places.items():
        source = plan.kinds.sources.module(module)
        assert source is not None
        text = slice_of(source, carried[module]) if module in carried else source.text
        shown = "/".join(place) + ".py"
        if module not in plan.graph and place in _PLUMBING:
            continue
        if source.is_package and module not in carried:
            shown = "/".join([*place, "__init__.py"])
        work = FileWork(shown, module, source.text, text, plan, carried=module in carried)
        _rewrite(work, _cache_key(plan, module, shown) if module in carried else None)
        result.files[shown] = work.text
        result.before[shown] = source.text
        result.changes += work.changes
    if "named_parameters" in plan.extras:
        result.files["named_parameters.py"] = NAMED_PARAMETERS
    plumbing = make_pipeline(plan)
    if HELPERS in plan.extras:
        result.files[f"{HELPERS}.py"] = HELPERS_TEXT
    result.files |= plumbing.files
    result.generated = plumbing.files.keys() - {"arch.py"}
    result.changes += plumbing.changes
    for shown in plumbing.files:
        parts = shown.removesuffix(".py").split("/")
        name = ".".join([plan.target.package, *[p for p in parts if p != "__init__"]])
        source = plan.kinds.sources.module(name)
        result.before[shown] = source.text if source else ""
    if carried:
        result.files["carried/__init__.py"] = (
            '"""Layers without a ModuleV3 equivalent, carried over from the V2 sources."""\n'
        )
    for shown in list(result.files):
        parts = shown.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            init = "/".join([*parts[:depth], "__init__.py"])
            result.files.setdefault(init, "")
    return result


# Carried files rewritten in this process: many architectures carry the same layers.
_done: dict[Any, FileWork] = {}


def _cache_key(plan: Plan, module: str, shown: str) -> Any:
    """All that the rewritten text of a carried file depends on."""
    carried = frozenset((m, frozenset(names)) for m, names in plan.closure.carried.items())
    return (
        module,
        shown,
        carried,
        frozenset(plan.closure.native),
        plan.parallel,
        plan.signals,
        plan.weights,
    )


def _rewrite(work: FileWork, key: Any) -> None:
    if key is not None and key in _done:
        done = _done[key]
        work.text, work.changes = done.text, list(done.changes)
        if "NamedParameters" in done.text:
            work.plan.extras.add("named_parameters")
        if f"{HELPERS} import" in done.text:
            work.plan.extras.add(HELPERS)
        return
    graph = work.module in work.plan.graph
    work.facts["keep_unused"] = not graph
    order = order_for(work.plan.parallel, work.plan.signals)
    for codemod in order if graph else (Imports,):
        apply(codemod, work)
    if key is not None:
        _done[key] = work


def slice_of(source: ModuleSource, names: set[str]) -> str:
    """Header, docstring, imports and the named definitions of a module, in their order."""
    module = cst.parse_module(source.text)
    body = []
    for index, statement in enumerate(module.body):
        if _keeps(statement, names) or (index == 0 and _is_docstring(statement)):
            body.append(statement)
    return str(module.with_changes(body=body, footer=()).code)


def _is_docstring(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    first = statement.body[0]
    return isinstance(first, cst.Expr) and isinstance(
        first.value, cst.SimpleString | cst.ConcatenatedString
    )


def _keeps(statement: cst.CSTNode, names: set[str]) -> bool:
    if isinstance(statement, cst.ClassDef | cst.FunctionDef):
        return statement.name.value in names
    if isinstance(statement, cst.If):
        return any(
            isinstance(inner, cst.SimpleStatementLine)
            and isinstance(inner.body[0], cst.ImportFrom | cst.Import)
            for inner in statement.body.body
        )
    if isinstance(statement, cst.SimpleStatementLine):
        first = statement.body[0]
        if isinstance(first, cst.Import | cst.ImportFrom):
            return True
        if isinstance(first, cst.Assign):
            target = first.targets[0].target
            return isinstance(target, cst.Name) and target.value in names
        if isinstance(first, cst.AnnAssign):
            return isinstance(first.target, cst.Name) and first.target.value in names
    return False
