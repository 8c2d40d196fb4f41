"""The plumbing around a migrated graph: model, inputs, batch processor, registration.

V3's pipeline base loads, builds and compiles by itself, so of a V2 pipeline model only what tells
one architecture from another is kept: class settings, how the config is made, how the state dict is
read. These are collected along the V2 class's bases, nearest first, into one class.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from textwrap import indent

from maxport.migrate.batching import (
    INPUT_TYPES,
    LIB,
    Names,
    decoder_batching,
    decoder_inputs,
    encoder_batching,
    encoder_imports,
    encoder_inputs,
    encoder_run,
    own_input_types,
)
from maxport.migrate.closure import definition
from maxport.migrate.codemods import order_for
from maxport.migrate.construction import GIVEN, Chain, Construction, pipeline_chain
from maxport.migrate.parallel import HELPERS
from maxport.migrate.plan import Plan
from maxport.migrate.registered import Registration, registrations
from maxport.migrate.registration import rewritten_arch
from maxport.migrate.rewrite import Change, FileWork, apply
from maxport.migrate.sources import ModuleSource

# What V3's base class does instead, or what served several devices.
REPLACED = frozenset(
    {
        "__init__", "load_model", "load_graphs", "graph_specs", "execute", "model",
        "prepare_initial_token_inputs", "prepare_next_token_inputs", "_init_distributed_runtime",
        "_build_graph_for_compile", "_build_graph", "batch_processor_cls", "state_dict",
        "signal_buffers", "_models",
    }
)  # fmt: skip
_GONE_NAMES = frozenset({"GraphSpec", "Signals", "Graph", "GraphRole", "compile_graphs"})
BATCH = ("tokens", "return_n_logits", "input_row_offsets")


@dataclass
class Plumbing:
    """Generated files and what was decided on the way."""

    files: dict[str, str] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def note(self, file: str, line: int, level: str, what: str) -> None:
        """Record one decision, with the V2 line it concerns."""
        self.changes.append(Change(file, line, "pipeline", level, what))  # type: ignore[arg-type]


@dataclass
class _Member:
    source: ModuleSource
    node: ast.stmt
    owner: str


def make_pipeline(plan: Plan) -> Plumbing:
    """Write the plumbing of a decoder or an encoder; nothing when the target registers nothing."""
    made = Plumbing()
    found = registrations(plan.kinds, plan.target)
    if not found:
        return made
    first = found[0]
    source = plan.kinds.sources.module(first.pipeline.module)
    node = source.classes.get(first.pipeline.name) if source else None
    if source is None or node is None:
        made.note(
            "model.py", 1, "manual", f"cannot find the pipeline model {first.pipeline.dotted}"
        )
        return made
    chain = pipeline_chain(plan.kinds, first.pipeline, plan.target.package)
    cache = "KVCache" in plan.kinds.walk.lane_of(first.pipeline)[1]
    names = Names(plan, first, cache)
    header = _header(source)
    made.files["inputs.py"] = header + (decoder_inputs(names) if cache else encoder_inputs(names))
    made.files["batch_processor.py"] = header + (
        decoder_batching(names) if cache else encoder_batching(names)
    )
    made.files["model.py"] = header + _model(plan, names, chain, made)
    made.files["arch.py"] = rewritten_arch(plan, first, names.batching, made)
    made.files["__init__.py"] = header + _init(found)
    return made


def _header(source: ModuleSource) -> str:
    lines = []
    for line in source.text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line)
    return "\n".join(lines) + "\n" if lines else ""


# --- model.py --------------------------------------------------------------------------------


def _model(plan: Plan, names: Names, chain: Chain, made: Plumbing) -> str:
    members = _members(plan, chain, made)
    root_module = plan.relative_from_top(plan.root.module)
    imports: dict[str, str] = {
        names.batching: f"from .batch_processor import {names.batching}",
        "Any": "from typing import Any, ClassVar",
        "TextContext": "from max.pipelines.context import TextContext",
        plan.root.name: f"from {root_module} import {plan.root.name}",
    }
    copied: dict[str, str] = {}
    body = ""
    for member in members.values():
        text = _text(member.source, member.node)
        body += "\n" + text + "\n"
        _imports_of(plan, member.source, member.node, imports, copied)
    construct = _constructs(plan, chain, made, imports, copied)
    declared = ""
    mixin = any("LogProbabilitiesMixin" in ast.unparse(b) for _, n in chain for b in n.bases)
    base = "ModuleV3PipelineModelWithKVCache" if names.cache else "ModuleV3PipelineModel"
    imports[base] = f"from {LIB} import {base}"
    bases = f"{base}[TextContext]"
    if mixin:
        imports["mixin"] = f"from {LIB}.log_probabilities import LogProbabilitiesMixin"
        bases = f"LogProbabilitiesMixin, {bases}"
    doc = ast.get_docstring(chain[0][1]) or f"{names.model} on ModuleV3."
    doc = indent(doc, "    ").strip() + ("\n    " if "\n" in doc else "")
    text = f'"""The pipeline model of {plan.name}: loads, builds and compiles the graph."""\n\n'
    text += "from __future__ import annotations\n\n"
    if not names.cache:
        body += encoder_run(names)
        if own_input_types(names):  # V2's root knows better than its batch processor
            declared = "        self.input_types = nn_model.input_types()\n"
            body += INPUT_TYPES
        imports |= encoder_imports(names)
    text += "\n".join(dict.fromkeys(imports.values())) + "\n"
    text += "".join(f"\n{statement}\n" for statement in copied.values())
    text += f'\n\nclass {names.model}({bases}):\n    """{doc}"""\n\n'
    text += f"    batch_processor_cls: ClassVar[type[Any]] = {names.batching}\n{body}"
    text += (
        "\n    def _instantiate_module(self, model_config: Any) -> Any:\n"
        f"{construct}"
        f"{declared}"
        "        return nn_model\n"
    )
    return text


def _constructs(
    plan: Plan,
    chain: Chain,
    made: Plumbing,
    imports: dict[str, str],
    copied: dict[str, str],
) -> str:
    """Statements that construct the root on the device, or on a mesh of several."""
    one = _construct(plan, plan.construction, chain, made, imports, copied)
    moved = "        nn_model.to(self.devices[0])\n"
    if not plan.parallel:
        return one + moved
    plan.extras.add(HELPERS)
    imports["placing_on"] = f"from .{HELPERS} import placing_on, require_split"
    built = one
    if plan.several:
        many = _construct(plan, plan.several_construction, chain, made, imports, copied)
        place = plan.relative_from_top(plan.several.module)
        imports[plan.several.name] = f"from {place} import {plan.several.name}"
        built = (
            "        nn_model: Any\n        if len(self.devices) > 1:\n"
            + indent(many, "    ")
            + "        else:\n"
            + indent(one, "    ")
        )
    return (
        _refusal(plan, chain, made)
        + "        with placing_on(self.devices):\n"
        + indent(built, "    ")
        + "        if len(self.devices) == 1:\n"
        + indent(moved, "    ")
        + "        else:\n            require_split(nn_model)\n"
    )


def _refusal(plan: Plan, chain: Chain, made: Plumbing) -> str:
    """Refuse what V2 spreads over devices in other ways than by tensor parallelism."""
    sources = [source for source, _ in chain] + [
        source for name in plan.graph if (source := plan.kinds.sources.module(name))
    ]
    ways = {
        "data parallelism": ("data_parallel_degree", "self.pipeline_config.model"),
        "expert parallelism": ("ep_size", "self.pipeline_config.runtime"),
    }
    text = ""
    for way, (setting, owner) in ways.items():
        if any(setting in source.text for source in sources):
            made.note("model.py", chain[0][1].lineno, "manual", f"{way} is refused")
            text += (
                f"        if {owner}.{setting} > 1:\n"
                f"            # maxport MANUAL (pipeline): {way} is not migrated.\n"
                f'            raise NotImplementedError("maxport: {way} is not migrated")\n'
            )
    return text


def _construct(
    plan: Plan,
    found: Construction | None,
    chain: Chain,
    made: Plumbing,
    imports: dict[str, str],
    copied: dict[str, str],
) -> str:
    """Statements that construct a root as `nn_model`, over `model_config`.

    They go through the graph's codemods, because they may construct V2 layers.
    """
    if found is None:
        made.note("model.py", chain[0][1].lineno, "manual", f"no call of {plan.root.name} found")
        return f"        nn_model = {plan.root.name}(model_config)\n"
    if not found.statements and found.parameter == GIVEN:
        return f"        nn_model = {ast.unparse(found.call)}\n"
    text = "\n".join(_import_lines(found.source))
    text += "\n\n\ndef construct(self, model_config):\n" + indent(found.text, "    ") + "\n"
    work = FileWork("model.py", found.source.name, found.source.text, text, plan)
    place = plan.places.get(found.source.name)
    plan.places[found.source.name] = ("model",)
    for codemod in order_for(plan.parallel, plan.signals):
        apply(codemod, work)
    plan.places.pop(found.source.name)
    if place is not None:
        plan.places[found.source.name] = place
    made.changes += work.changes
    function: ast.FunctionDef | None = None
    for node in ast.parse(work.text).body:
        if isinstance(node, ast.FunctionDef) and node.name == "construct":
            function = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            _take_imports(node, imports)
        else:
            copied.setdefault(ast.unparse(node), ast.unparse(node))
    assert function is not None
    lines = work.text.splitlines()[function.lineno : function.end_lineno]
    body = "\n".join(lines).rpartition("return ")
    return indent(f"{body[0]}nn_model = {body[2]}", "    ") + "\n"


def _import_lines(source: ModuleSource) -> list[str]:
    """Top-level import statements of a module, as they stand."""
    nodes = [n for n in source.tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    return [_text(source, node) for node in nodes]


def _take_imports(node: ast.Import | ast.ImportFrom, imports: dict[str, str]) -> None:
    """Add what an import statement binds to `imports`, one line per name."""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return
    for alias in node.names:
        head = "import "
        if isinstance(node, ast.ImportFrom):
            head = f"from {'.' * node.level}{node.module or ''} import "
        line = head + ast.unparse(alias)
        imports.setdefault(alias.asname or alias.name, line)


def _members(plan: Plan, chain: Chain, made: Plumbing) -> dict[str, _Member]:
    """Settings and methods to keep, nearest class first."""
    kept: dict[str, _Member] = {}
    seen: set[str] = set()
    for source, node in chain:
        for item in node.body:
            name = _bound(item)
            if not name or name in seen:
                continue
            seen.add(name)
            gone = _mentions_gone(plan, source, item)
            if name in REPLACED or gone or name.endswith("_spec"):
                if name not in ("__init__", "model"):
                    made.note("model.py", item.lineno, "safe", f"{name}: V3's base class does this")
                elif name == "__init__" and _checks(item):
                    made.note("model.py", item.lineno, "review", "__init__'s checks are dropped")
                continue
            if isinstance(item, ast.AnnAssign) and item.value is None:
                continue
            kept[name] = _Member(source, item, node.name)
    return kept


def _bound(item: ast.stmt) -> str:
    if isinstance(item, ast.FunctionDef):
        return item.name
    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
        return item.target.id
    if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
        return item.targets[0].id
    return ""


def _mentions_gone(plan: Plan, source: ModuleSource, item: ast.stmt) -> bool:
    for node in ast.walk(item):
        if isinstance(node, ast.Name):
            if node.id in _GONE_NAMES:
                return True
            found = plan.kinds.sources.resolve(source.name, node.id)
            if node.id in source.imports and plan.kinds.of(found) == "layer":
                return True
    return False


def _checks(item: ast.stmt) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(item))


def _text(source: ModuleSource, node: ast.stmt) -> str:
    """Source lines of a class member, decorators included, as they stand."""
    first = node.lineno
    for decorator in getattr(node, "decorator_list", []):
        first = min(first, decorator.lineno)
    lines = source.text.splitlines()[first - 1 : node.end_lineno]
    return "\n".join(lines)


def _imports_of(
    plan: Plan,
    source: ModuleSource,
    node: ast.AST,
    imports: dict[str, str],
    copied: dict[str, str],
) -> None:
    """Import what a kept member uses; copy module-level values and functions it reads."""
    for item in ast.walk(node):
        if not isinstance(item, ast.Name) or item.id in imports or item.id in copied:
            continue
        name = item.id
        if name in source.imports:
            target = source.imports[name]
            place = plan.place_for_top(target.module)
            if not target.name:
                imports[name] = f"import {target.module}"
                continue
            alias = f" as {name}" if name != target.name else ""
            imports[name] = f"from {place} import {target.name}{alias}"
        elif name in source.classes:
            imports[name] = f"from {plan.place_for_top(source.name)} import {name}"
        elif name in source.functions or name in source.constants:
            statement = definition(source, name)
            if statement is not None:
                copied[name] = _text(source, statement)
                _imports_of(plan, source, statement, imports, copied)


def _init(found: list[Registration]) -> str:
    names = [item.variable for item in found]
    return (
        '"""ModuleV3 variant, migrated from the V2 graph API."""\n\n'
        f"from .arch import {', '.join(names)}\n\n"
        f"ARCHITECTURES = [{', '.join(names)}]\n\n"
        f"__all__ = [{', '.join(repr(n) for n in ['ARCHITECTURES', *names])}]\n".replace("'", '"')
    )
