"""The port's files around its graph: registration, pipeline model, configuration, weights."""

from __future__ import annotations

from maxport.emit.prose import docstring
from maxport.emit.shell_config import render_model_config
from maxport.emit.shell_weights import render_weight_adapters
from maxport.emit.spec import PortSpec


def render_shell(spec: PortSpec) -> dict[str, str]:
    """Source of every port file but the graph, by file name, not yet formatted.

    Raises:
        MaxportError: If the spec contradicts itself.
    """
    spec.check()
    return {
        "__init__.py": render_init(spec),
        "arch.py": render_arch(spec),
        "model.py": render_model(spec),
        "model_config.py": render_model_config(spec),
        "weight_adapters.py": render_weight_adapters(spec),
    }


def render_init(spec: PortSpec) -> str:
    """`__init__.py`: the `ARCHITECTURES` list that MAX looks for."""
    head = docstring(
        f"{spec.display_name} for MAX, the port that `max serve --custom-architectures` loads."
    )
    return f'''{head}

from .arch import {spec.slug}_arch

ARCHITECTURES = [{spec.slug}_arch]

__all__ = ["ARCHITECTURES", "{spec.slug}_arch"]
'''


def render_arch(spec: PortSpec) -> str:
    """`arch.py`: the `SupportedArchitecture`."""
    repos = ", ".join(f'"{repo}"' for repo in spec.example_repo_ids)
    return f'''"""Registration of `{spec.class_name}` with MAX."""

from max.graph.weights import WeightsFormat
from max.pipelines.architectures.llama3_modulev3.batch_processor import Llama3ModuleV3BatchProcessor
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
from max.pipelines.lib import SupportedArchitecture, TextTokenizer
from max.pipelines.modeling.types import PipelineTask

from .model import {_pipeline_class(spec)}
from .model_config import {spec.config_class}
from .weight_adapters import convert_safetensor_state_dict

{spec.slug}_arch = SupportedArchitecture(
    name="{spec.class_name}",
    example_repo_ids=[{repos}],
    default_encoding={spec.config_class}.DEFAULT_ENCODING,
    supported_encodings={spec.config_class}.SUPPORTED_ENCODINGS,
    pipeline_model={_pipeline_class(spec)},
    task=PipelineTask.TEXT_GENERATION,
    tokenizer=TextTokenizer,
    context_type=TextContext,
    default_weights_format=WeightsFormat.safetensors,
    weight_adapters={{WeightsFormat.safetensors: convert_safetensor_state_dict}},
    multi_gpu_supported=False,
    config={spec.config_class},
    batching=Llama3ModuleV3BatchProcessor,
    memory_planner=PagedMemoryPlanner,
    supports_overlap_scheduler=False,
    supports_device_graph_capture=False,
)
'''


def render_model(spec: PortSpec) -> str:
    """`model.py`: the pipeline model, on MAX's own base class and Llama's batch processor."""
    name, config = _pipeline_class(spec), spec.config_class
    head = docstring(
        f"Loads the {spec.display_name} graph with a checkpoint's weights and runs it in MAX's "
        "pipelines."
    )
    return f'''{head}

from __future__ import annotations

from typing import Any, ClassVar

from max.graph.weights import WeightData
from max.pipelines.architectures.llama3_modulev3.batch_processor import Llama3ModuleV3BatchProcessor
from max.pipelines.context import TextContext
from max.pipelines.lib import ModuleV3PipelineModelWithKVCache
from max.pipelines.lib.log_probabilities import LogProbabilitiesMixin

from .{spec.slug} import {spec.graph_class}
from .model_config import {config}


class {name}(LogProbabilitiesMixin, ModuleV3PipelineModelWithKVCache[TextContext]):
    """Single-device {spec.display_name}: ragged batches through the paged KV cache."""

    model_config_cls: ClassVar[type[{config}]] = {config}
    batch_processor_cls: ClassVar[type[Llama3ModuleV3BatchProcessor]] = Llama3ModuleV3BatchProcessor

    def _create_model_config(self, state_dict: dict[str, WeightData]) -> {config}:
        config = {config}.initialize(self.pipeline_config, max_seq_len=self.max_seq_len)
        config.finalize(
            huggingface_config=self.huggingface_config,
            state_dict=state_dict,
            return_logits=self.return_logits,
        )
        return config

    def _prepare_state_dict(
        self, state_dict: dict[str, WeightData], model_config: {config}
    ) -> dict[str, WeightData]:
        """Weights in the dtype the graph runs in, e.g. a float32 checkpoint served in bfloat16."""
        return {{
            name: weight.astype(model_config.dtype) if weight.dtype.is_float() else weight
            for name, weight in state_dict.items()
        }}

    def _instantiate_module(self, model_config: {config}) -> Any:
        module = {spec.graph_class}(model_config)
        module.to(self.devices[0])
        return module
'''


def _pipeline_class(spec: PortSpec) -> str:
    return f"{spec.config_class.removesuffix('Config')}PipelineModel"
