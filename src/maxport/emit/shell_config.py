"""`model_config.py`: the port's configuration, read from config.json through transformers."""

from __future__ import annotations

import textwrap

from maxport.emit.prose import docstring
from maxport.emit.spec import PortSpec

_IMPORTS = """
from max.driver import Device
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import KVCacheParams
from max.nn.transformer import ReturnLogits
from max.pipelines.kv_cache import cache_dtype_for_encoding
from max.pipelines.lib import KVCacheConfig, MAXModelConfig, PipelineConfig
from max.pipelines.lib.config.model_config import _select_quantization_encoding
from max.pipelines.lib.interfaces.arch_config import (
    ArchConfigWithKVCache,
    ArchConfigWithStoredKVParams,
)
from max.pipelines.modeling.config_enums import SupportedEncoding, supported_encoding_dtype
from transformers import PreTrainedConfig
"""

_OWN_FIELDS = '''
dtype: DType
"""Dtype of weights and activations."""

devices: list[DeviceRef]
"""Devices the graph runs on; the port uses the first."""

max_seq_len: int
"""Most tokens of one request, prompt and answer together."""

kv_params: KVCacheParams
"""Layout of the paged KV cache."""

return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN
"""Which positions' logits the graph returns."""

@property
def device(self) -> Device:
    """The device the graph runs on."""
    return self.devices[0].to_device()
'''


def render_model_config(spec: PortSpec) -> str:
    """Source of `model_config.py`, not yet formatted."""
    imports = "\n".join((*spec.config_imports, _IMPORTS.strip()))
    body = "\n".join(
        (
            _encodings(spec),
            _fields(spec),
            _OWN_FIELDS,
            _kv_params(spec),
            _max_length(spec),
            _check_traced(spec),
            _initialize(spec),
            _finalize(spec),
        )
    )
    head = docstring(
        f"Configuration of the {spec.display_name} graph, read from the checkpoint's config.json."
    )
    about = docstring(
        f"What the {spec.display_name} graph needs to know of a `{spec.hf_class}` checkpoint.",
        indent=4,
    )
    return f"""{head}

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

{imports}


@dataclass(kw_only=True)
class {spec.config_class}(ArchConfigWithStoredKVParams, ArchConfigWithKVCache):
    {about}

{textwrap.indent(body, "    ")}"""


def _encodings(spec: PortSpec) -> str:
    encodings = ", ".join(f'"{encoding}"' for encoding in spec.encodings)
    return (
        f'DEFAULT_ENCODING: ClassVar[SupportedEncoding] = "{spec.default_encoding}"\n'
        f"SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {{{encodings}}}\n"
    )


def _fields(spec: PortSpec) -> str:
    return "\n".join(
        f"{field.name}: {field.annotation}\n{docstring(field.doc, indent=4)}\n"
        for field in spec.config_fields
    )


def _hf(spec: PortSpec, name: str) -> str:
    """The assignment of `hf`, the configuration the expressions read."""
    return f"hf = {name}.{spec.text_config}" if spec.text_config else f"hf = {name}"


def _kv_params(spec: PortSpec) -> str:
    return f'''
@classmethod
def construct_kv_params(
    cls,
    huggingface_config: PreTrainedConfig,
    pipeline_config: PipelineConfig,
    devices: list[DeviceRef],
    kv_cache_config: KVCacheConfig,
    cache_dtype: DType,
    *,
    allow_kv_head_replication: bool = False,
) -> KVCacheParams:
    """Layout of the paged KV cache for this checkpoint."""
    {_hf(spec, "huggingface_config")}
    return kv_cache_config.to_params(
        dtype=cache_dtype,
        allow_kv_head_replication=allow_kv_head_replication,
        n_kv_heads={spec.kv_cache.n_kv_heads},
        head_dim={spec.kv_cache.head_dim},
        num_layers={spec.kv_cache.num_layers},
        devices=devices,
        data_parallel_degree=pipeline_config.model.data_parallel_degree,
    )
'''


def _max_length(spec: PortSpec) -> str:
    """An override where MAX's own reading of `max_position_embeddings` would not do."""
    if spec.max_length == "hf.max_position_embeddings" and not spec.text_config:
        return ""
    if spec.max_length is None:
        return '''
@classmethod
def calculate_max_seq_len(
    cls, huggingface_config: PreTrainedConfig, model_config: MAXModelConfig
) -> int:
    """The length asked for: the model itself sets no bound.

    Raises:
        ValueError: If no length was asked for.
    """
    del huggingface_config
    if model_config.max_length is None:
        raise ValueError("this model has no longest length of its own: pass --max-length")
    return model_config.max_length
'''
    return f'''
@classmethod
def calculate_max_seq_len(
    cls, huggingface_config: PreTrainedConfig, model_config: MAXModelConfig
) -> int:
    """The length asked for, or the model's own.

    Raises:
        ValueError: If the length asked for is greater than the model's own.
    """
    {_hf(spec, "huggingface_config")}
    longest = {spec.max_length}
    if model_config.max_length is None:
        return int(longest)
    if model_config.max_length > longest:
        raise ValueError(f"max_length {{model_config.max_length}} exceeds the model's {{longest}}")
    return model_config.max_length
'''


def _check_traced(spec: PortSpec) -> str:
    """A check of the keys that decide what is computed, where the model has any."""
    if not spec.fixed:
        return ""
    rows = "\n".join(f"        ({k.key!r}, {k.read}, {k.value!r})," for k in spec.fixed)
    return f'''
@staticmethod
def check_traced(hf: PreTrainedConfig) -> None:
    """Refuse a checkpoint of the same class that computes something else.

    Raises:
        ValueError: If a key of config.json is not what it was when the model was traced.
    """
    traced = (
{rows}
    )
    wrong = [
        f"{{key}}={{found!r}}, not {{value!r}}" for key, found, value in traced if found != value
    ]
    if wrong:
        raise ValueError("needs another port, see `maxport port`: " + "; ".join(wrong))
'''


def _initialize(spec: PortSpec) -> str:
    reads = "\n".join(f"        {field.name}={field.read}," for field in spec.config_fields)
    if spec.text_config:
        load = "hf_config = model_config.huggingface_config\nif hf_config is None:"
    else:
        load = "hf = model_config.huggingface_config\nif hf is None:"
    text = f"    {_hf(spec, 'hf_config')}\n" if spec.text_config else ""
    whole = "hf_config" if spec.text_config else "hf"
    check = "    cls.check_traced(hf)\n" if spec.fixed else ""
    refusal = ", or it\n            needs a port of its own" if spec.fixed else ""
    return f'''
@classmethod
def initialize(
    cls,
    pipeline_config: PipelineConfig,
    model_config: MAXModelConfig | None = None,
    *,
    max_seq_len: int,
) -> Self:
    """Read the configuration MAX loaded for a checkpoint.

    Args:
        pipeline_config: The pipeline's settings.
        model_config: The model's settings, `pipeline_config.model` if None.
        max_seq_len: Most tokens of one request.

    Raises:
        ValueError: If the checkpoint has no config.json that transformers can read{refusal}.
    """
    model_config = model_config or pipeline_config.model
{textwrap.indent(load, "    ")}
        raise ValueError(f"{{model_config.model_path}} has no config.json to read")
{text}{check}    encoding = _select_quantization_encoding(model_config, cls.DEFAULT_ENCODING)
    devices = [DeviceRef(spec.device_type, spec.id) for spec in model_config.device_specs]
    return cls(
{reads}
        dtype=supported_encoding_dtype(encoding),
        devices=devices,
        max_seq_len=max_seq_len,
        kv_params=cls.construct_kv_params(
            huggingface_config={whole},
            pipeline_config=pipeline_config,
            devices=devices,
            kv_cache_config=model_config.kv_cache,
            cache_dtype=cache_dtype_for_encoding(
                encoding, model_config.kv_cache.kv_cache_format
            ),
        ),
    )
'''


def _finalize(spec: PortSpec) -> str:
    tie = spec.tie
    unused = "huggingface_config" if tie else "huggingface_config, state_dict"
    decide = f'    self.{tie.field} = "{tie.target}" not in state_dict\n' if tie else ""
    believed = "; the weights are believed over it" if tie else ""
    return f'''
def finalize(
    self,
    huggingface_config: PreTrainedConfig,
    state_dict: Mapping[str, Any],
    return_logits: ReturnLogits,
) -> None:
    """Set what only the loaded weights and the pipeline decide.

    Args:
        huggingface_config: The checkpoint's configuration{believed}.
        state_dict: Weights by the graph's parameter names.
        return_logits: Which positions' logits the graph returns.
    """
    del {unused}
{decide}    self.return_logits = return_logits
'''
