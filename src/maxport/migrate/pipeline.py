"""The plumbing around a migrated graph: model, inputs, batch processor, registration.

V3's pipeline base loads, builds and compiles by itself, so of a V2 pipeline model only what tells
one architecture from another is kept: class settings, how the config is made, how the state dict is
read. These are collected along the V2 class's bases, nearest first, into one class.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from maxport.migrate.classify import bases_of
from maxport.migrate.closure import definition
from maxport.migrate.plan import Plan
from maxport.migrate.registration import Registration, registrations, rewritten_arch
from maxport.migrate.rewrite import Change
from maxport.migrate.sources import ARCHITECTURES, Definition, ModuleSource

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
LIB = "max.pipelines.lib"


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
    found = registrations(plan)
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
    chain = _chain(plan, first.pipeline)
    cache = "KVCache" in plan.kinds.walk.lane_of(first.pipeline)[1]
    names = _Names(plan, first, cache)
    header = _header(source)
    made.files["inputs.py"] = header + (_decoder_inputs(names) if cache else _encoder_inputs(names))
    made.files["batch_processor.py"] = header + (
        _decoder_batching(names) if cache else _encoder_batching(names)
    )
    made.files["model.py"] = header + _model(plan, names, chain, made)
    made.files["arch.py"] = rewritten_arch(plan, first, names.batching, made)
    made.files["__init__.py"] = header + _init(found)
    return made


@dataclass
class _Names:
    plan: Plan
    first: Registration
    cache: bool

    @property
    def model(self) -> str:
        return self.first.pipeline.name

    @property
    def inputs(self) -> str:
        return f"{self.plan.root.name.removesuffix('Model')}Inputs"

    @property
    def batching(self) -> str:
        return f"{self.plan.root.name.removesuffix('Model')}ModuleV3BatchProcessor"


def _header(source: ModuleSource) -> str:
    lines = []
    for line in source.text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line)
    return "\n".join(lines) + "\n" if lines else ""


def _chain(plan: Plan, first: Definition) -> list[tuple[ModuleSource, ast.ClassDef]]:
    """The pipeline model and its bases that are architectures' own, nearest first."""
    found: list[tuple[ModuleSource, ast.ClassDef]] = []
    queue = [first]
    while queue:
        at = queue.pop(0)
        source = plan.kinds.sources.module(at.module)
        node = source.classes.get(at.name) if source else None
        own = at.module.startswith((ARCHITECTURES, plan.target.package))
        if source is None or node is None or not own:
            continue
        found.append((source, node))
        queue += bases_of(plan.kinds.sources, source, node)
    return found


# --- model.py --------------------------------------------------------------------------------


def _model(
    plan: Plan, names: _Names, chain: list[tuple[ModuleSource, ast.ClassDef]], made: Plumbing
) -> str:
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
    arguments = _root_arguments(plan, chain)
    if arguments is None:
        made.note("model.py", chain[0][1].lineno, "manual", f"no call of {plan.root.name} found")
        arguments = "model_config"
    mixin = any("LogProbabilitiesMixin" in ast.unparse(b) for _, n in chain for b in n.bases)
    base = "ModuleV3PipelineModelWithKVCache" if names.cache else "ModuleV3PipelineModel"
    imports[base] = f"from {LIB} import {base}"
    bases = f"{base}[TextContext]"
    if mixin:
        imports["mixin"] = f"from {LIB}.log_probabilities import LogProbabilitiesMixin"
        bases = f"LogProbabilitiesMixin, {bases}"
    doc = ast.get_docstring(chain[0][1]) or f"{names.model} on ModuleV3."
    text = f'"""The pipeline model of {plan.name}: loads, builds and compiles the graph."""\n\n'
    text += "from __future__ import annotations\n\n"
    if not names.cache:
        body += _ENCODER_RUN.replace("INPUTS", names.inputs)
        imports |= _encoder_imports(names)
    text += "\n".join(dict.fromkeys(imports.values())) + "\n"
    text += "".join(f"\n{statement}\n" for statement in copied.values())
    text += f'\n\nclass {names.model}({bases}):\n    """{doc}"""\n\n'
    text += f"    batch_processor_cls: ClassVar[type[Any]] = {names.batching}\n{body}"
    text += (
        "\n    def _instantiate_module(self, model_config: Any) -> Any:\n"
        f"        nn_model = {plan.root.name}({arguments})\n"
        "        nn_model.to(self.devices[0])\n"
        "        return nn_model\n"
    )
    return text


_ENCODER_RUN = '''
    model: Callable[..., Any]

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        session: InferenceSession,
        devices: list[Device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        *,
        memory_plan: MemoryPlan,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.ALL,
        max_batch_size: int = 1,
    ) -> None:
        super().__init__(
            pipeline_config,
            session,
            devices,
            kv_cache_config,
            weights,
            adapter=adapter,
            return_logits=return_logits,
            max_batch_size=max_batch_size,
            memory_plan=memory_plan,
        )
        self.model = self.load_model()

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs the compiled encoder."""
        assert isinstance(model_inputs, INPUTS)
        outputs = self.model(model_inputs.next_tokens_batch, model_inputs.attention_mask)
        first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
        return ModelOutputs(logits=first.driver_tensor)
'''


def _encoder_imports(names: _Names) -> dict[str, str]:
    lines = (
        "from collections.abc import Callable",
        "from max.driver import Device",
        "from max.engine import InferenceSession",
        "from max.graph.weights import Weights, WeightsAdapter",
        "from max.nn.transformer import ReturnLogits",
        f"from {LIB} import KVCacheConfig, ModelInputs, ModelOutputs, PipelineConfig",
        f"from {LIB}.memory_estimation import MemoryPlan",
        f"from .inputs import {names.inputs}",
    )
    return {line: line for line in lines}


def _members(
    plan: Plan, chain: list[tuple[ModuleSource, ast.ClassDef]], made: Plumbing
) -> dict[str, _Member]:
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


def _root_arguments(plan: Plan, chain: list[tuple[ModuleSource, ast.ClassDef]]) -> str | None:
    """Arguments the V2 pipeline model constructs the root with, over `model_config`."""
    for source, node in chain:
        for function in ast.walk(node):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                    continue
                if plan.kinds.sources.resolve(source.name, call.func.id) == plan.root:
                    parts = [ast.unparse(a) for a in call.args]
                    parts += [f"{k.arg}={ast.unparse(k.value)}" for k in call.keywords]
                    return ", ".join(parts)
    return None


# --- inputs, batching, package ---------------------------------------------------------------


def _decoder_inputs(names: _Names) -> str:
    return f'''"""Model inputs, in the order of the graph's inputs."""

from __future__ import annotations

from dataclasses import dataclass

from max import tree
from max.driver import Buffer
from max.pipelines.lib import ModelInputs


@dataclass
class {names.inputs}(ModelInputs):
    """One ragged batch: tokens, their row offsets, how many logits to return, the KV cache."""

    tokens: Buffer
    input_row_offsets: Buffer
    return_n_logits: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Buffers in ModuleV3's input order."""
        cache = () if self.kv_cache_inputs is None else tree.leaves(self.kv_cache_inputs)
        return (self.tokens, self.return_n_logits, self.input_row_offsets, *cache)
'''


def _decoder_batching(names: _Names) -> str:
    return f'''"""Ragged batching on one device."""

from __future__ import annotations

from max.driver import Buffer
from max.nn.kv_cache import KVCacheInputs
from max.pipelines.context import TextContext
from max.pipelines.lib.interfaces.batch_processor import ModuleV3SingleReplicaBatchProcessor

from .inputs import {names.inputs}


class {names.batching}(ModuleV3SingleReplicaBatchProcessor[TextContext, {names.inputs}]):
    """Puts a batch into {names.inputs}."""

    def _make_inputs(
        self,
        *,
        tokens: Buffer,
        input_row_offsets: Buffer,
        return_n_logits: Buffer,
        kv_cache_inputs: KVCacheInputs[Buffer, Buffer],
    ) -> {names.inputs}:
        return {names.inputs}(
            tokens=tokens,
            input_row_offsets=input_row_offsets,
            return_n_logits=return_n_logits,
            kv_cache_inputs=kv_cache_inputs,
        )
'''


def _encoder_inputs(names: _Names) -> str:
    return f'''"""Model inputs of the encoder."""

from __future__ import annotations

from dataclasses import dataclass

from max.driver import Buffer
from max.pipelines.lib import ModelInputs


@dataclass
class {names.inputs}(ModelInputs):
    """One padded batch."""

    next_tokens_batch: Buffer
    attention_mask: Buffer
'''


def _encoder_batching(names: _Names) -> str:
    return f'''"""Padded batching for the encoder."""

from __future__ import annotations

from max.driver import Buffer
from max.pipelines.lib.interfaces.batch_processor import PaddedEncoderBatchProcessor

from .inputs import {names.inputs}


class {names.batching}(PaddedEncoderBatchProcessor[{names.inputs}]):
    """Puts a batch into {names.inputs}."""

    def _make_inputs(
        self, *, next_tokens_batch: Buffer, attention_mask: Buffer
    ) -> {names.inputs}:
        return {names.inputs}(
            next_tokens_batch=next_tokens_batch, attention_mask=attention_mask
        )
'''


def _init(found: list[Registration]) -> str:
    names = [item.variable for item in found]
    return (
        '"""ModuleV3 variant, migrated from the V2 graph API."""\n\n'
        f"from .arch import {', '.join(names)}\n\n"
        f"ARCHITECTURES = [{', '.join(names)}]\n\n"
        f"__all__ = [{', '.join(repr(n) for n in ['ARCHITECTURES', *names])}]\n".replace("'", '"')
    )
