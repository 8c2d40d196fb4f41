"""Inputs and batching of the V3 package, and how an encoder runs: text from templates.

A decoder on ModuleV3 takes MAX's ragged batch. An encoder keeps V2's own batch: what its batch
processor hands to `_make_inputs`, in that order, under the same base class.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from maxport.migrate.plan import Plan
from maxport.migrate.registered import Registration
from maxport.migrate.sources import Definition, dotted_name

LIB = "max.pipelines.lib"
_PADDED = Definition(f"{LIB}.interfaces.batch_processor", "PaddedEncoderBatchProcessor")


@dataclass
class Names:
    """Names that the generated files share."""

    plan: Plan
    first: Registration
    cache: bool

    @property
    def model(self) -> str:
        """Class of the pipeline model."""
        return self.first.pipeline.name

    @property
    def inputs(self) -> str:
        """Class of the model's inputs."""
        return f"{self.plan.root.name.removesuffix('Model')}Inputs"

    @property
    def batching(self) -> str:
        """Class of the batch processor."""
        return f"{self.plan.root.name.removesuffix('Model')}ModuleV3BatchProcessor"


def encoder_batch(names: Names) -> tuple[Definition, tuple[str, ...]]:
    """Base class and fields of V2's encoder batch; the padded one where V2 has none of its own."""
    plan, first = names.plan, names.first
    found = plan.kinds.sources.resolve(first.module, first.batching)
    source = plan.kinds.sources.module(found.module)
    node = source.classes.get(found.name) if source else None
    for item in node.body if node else ():
        if isinstance(item, ast.FunctionDef) and item.name == "_make_inputs":
            assert source is not None and node is not None
            bases = [plan.kinds.sources.resolve(source.name, dotted_name(b)) for b in node.bases]
            fields = tuple(arg.arg for arg in item.args.kwonlyargs)
            if bases and fields:
                return bases[0], fields
    return _PADDED, ("next_tokens_batch", "attention_mask")


def decoder_inputs(names: Names) -> str:
    """inputs.py of a decoder."""
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


def decoder_batching(names: Names) -> str:
    """batch_processor.py of a decoder."""
    return f'''"""Ragged batching of one replica."""

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


def encoder_inputs(names: Names) -> str:
    """inputs.py of an encoder."""
    _, fields = encoder_batch(names)
    lines = "".join(f"    {name}: Buffer\n" for name in fields)
    return f'''"""Model inputs of the encoder."""

from __future__ import annotations

from dataclasses import dataclass

from max.driver import Buffer
from max.pipelines.lib import ModelInputs


@dataclass
class {names.inputs}(ModelInputs):
    """One batch."""

{lines}'''


def encoder_batching(names: Names) -> str:
    """batch_processor.py of an encoder."""
    base, fields = encoder_batch(names)
    taken = "".join(f"        {name}: Buffer,\n" for name in fields)
    given = "".join(f"            {name}={name},\n" for name in fields)
    return f'''"""Batching for the encoder."""

from __future__ import annotations

from max.driver import Buffer
from {base.module} import {base.name}

from .inputs import {names.inputs}


class {names.batching}({base.name}[{names.inputs}]):
    """Puts a batch into {names.inputs}."""

    def _make_inputs(
        self,
        *,
{taken}    ) -> {names.inputs}:
        return {names.inputs}(
{given}        )
'''


ENCODER_RUN = '''
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
        outputs = self.model(FIELDS)
        first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
        return ModelOutputs(logits=first.driver_tensor)
'''


def encoder_run(names: Names) -> str:
    """Constructor and `execute` of an encoder's pipeline model."""
    fields = ", ".join(f"model_inputs.{name}" for name in encoder_batch(names)[1])
    return ENCODER_RUN.replace("INPUTS", names.inputs).replace("FIELDS", fields)


def own_input_types(names: Names) -> bool:
    """Whether V2's root declares its graph's inputs itself, without cache parameters."""
    root = names.plan.root
    source = names.plan.kinds.sources.module(root.module)
    node = source.classes.get(root.name) if source else None
    return any(
        isinstance(item, ast.FunctionDef)
        and item.name == "input_types"
        and len(item.args.args) == 1
        for item in (node.body if node else ())
    )


INPUT_TYPES = """
    def _get_compile_input_types(self, model_config: Any) -> tuple[Any, ...]:
        return self.input_types
"""


def encoder_imports(names: Names) -> dict[str, str]:
    """Import lines that `encoder_run` needs."""
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
