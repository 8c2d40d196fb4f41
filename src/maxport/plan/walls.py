"""Hard blockers of a port, each tied to what the model needs and this MAX or device lacks.

Nothing here knows a model by name: findings come from config.json, tensor headers, tokenizer
files, transformers' and MAX's own tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from maxport.checkpoint import Checkpoint
from maxport.checkpoint.configs import needs_remote_code
from maxport.checkpoint.summary import size_text
from maxport.plan.inspection import is_causal_lm, known_to_transformers
from maxport.plan.max_source import ARCHITECTURES, max_version, module_path
from maxport.plan.memory import Devices, estimate
from maxport.plan.native import NativeArch, native_archs, serving
from maxport.plan.quantization import quantization_walls
from maxport.plan.wall import Wall

_RECURRENT_KEY = re.compile(
    r"\.(A_log|dt_bias|dt_proj\.\w+|x_proj\.\w+|(short_)?conv(1d)?\.(weight|bias)"
    r"|time_(decay|first|faaaa|mix\w*|maa\w*))$"
)
"""Parameters of recurrent mixers: state matrices, step sizes, causal convolutions, decays."""

_RECURRENT_LAYER = re.compile(r"mamba|recurrent|linear_attention|ssm|rwkv|^conv$")
_EXPERT_KEY = re.compile(r"\.experts\.")


def check_walls(opened: Checkpoint, devices: Devices) -> list[Wall]:
    """All walls of a checkpoint on the given devices, the stopping ones first.

    Raises:
        MaxportError: MAX or transformers is not installed.
    """
    native = serving(opened.architecture) if opened.architecture else ()
    dtypes = sorted({tensor.dtype for tensor in opened.tensors.values()})
    walls = [
        *_model(opened),
        *_weights(opened),
        *quantization_walls(_quantization(opened), native, devices.kind, dtypes),
        *_state(opened, native),
        *_gpu_only(opened, devices),
        *_tokenizer(opened),
        *_memory(opened, devices),
    ]
    return sorted(walls, key=lambda wall: wall.level != "stop")


def exit_code(walls: list[Wall]) -> int:
    """0: no wall; 1: something to review; 2: stop."""
    if any(wall.level == "stop" for wall in walls):
        return 2
    return 1 if walls else 0


def _model(opened: Checkpoint) -> Iterator[Wall]:
    config, name = opened.config, opened.architecture
    kind = config.get("model_type")
    if name is None:
        yield Wall(
            "stop",
            "config",
            "an architecture class",
            "config.json has no `architectures`",
            'add it, for example "architectures": ["LlamaForCausalLM"]',
        )
    if needs_remote_code(config):
        yield Wall(
            "review",
            "code",
            f"{name} as the checkpoint's own Python code (config.json: auto_map)",
            "the installed transformers does not have it, so the reference is that code",
            "read it, then pass --trust-remote-code",
        )
    elif not known_to_transformers(config):
        yield Wall(
            "stop",
            "code",
            f"the model type {kind!r}",
            "the installed transformers does not know it and the checkpoint brings no code",
            "install a transformers version that has it",
        )
    elif name is not None and (config.get("is_encoder_decoder") or not is_causal_lm(config)):
        why = "an encoder-decoder" if config.get("is_encoder_decoder") else "no causal decoder"
        yield Wall(
            "stop",
            "kind",
            f"{name}, which is {why}",
            "maxport ports causal decoders with a KV cache",
            "serve it with MAX's own architecture if `maxport inspect` shows one",
        )


def _weights(opened: Checkpoint) -> Iterator[Wall]:
    if opened.tensors:
        stored = {tensor.dtype for tensor in opened.tensors.values()}
        if wide := stored & {"F64", "C64"}:
            yield Wall(
                "review",
                "weights",
                f"weights stored as {', '.join(sorted(wide))}",
                "MAX has no such weight encoding",
                "save the checkpoint in bfloat16 or float32",
            )
        return
    if opened.other_weights:
        yield Wall(
            "stop",
            "weights",
            f"weights in {opened.other_weights[0]}",
            "maxport and MAX's V3 lane read safetensors",
            "load with transformers and save_pretrained(), which writes safetensors",
        )
    else:
        yield Wall(
            "review",
            "weights",
            "weights to load and verify",
            "the checkpoint has a config only",
            "fine for planning and emitting; name a folder with weights to verify",
        )


def _quantization(opened: Checkpoint) -> Mapping[str, Any] | None:
    """`quantization_config`, or what ModelOpt writes beside config.json instead."""
    declared = opened.config.get("quantization_config")
    if isinstance(declared, Mapping) and declared:
        return declared
    beside = opened.read_json("hf_quant_config.json") or {}
    scheme = beside.get("quantization")
    if not isinstance(scheme, Mapping):
        return None
    producer = beside.get("producer")
    name = producer.get("name") if isinstance(producer, Mapping) else None
    return {"quant_method": name or "modelopt", **scheme}


def _state(opened: Checkpoint, native: tuple[NativeArch, ...]) -> Iterator[Wall]:
    keys = [name for name in opened.tensors if _RECURRENT_KEY.search(name)]
    layers = opened.config.get("layer_types")
    kinds = (
        {str(k) for k in layers if _RECURRENT_LAYER.search(str(k))}
        if (isinstance(layers, list))
        else set()
    )
    if not keys and not kinds:
        return
    evidence = keys[0] if keys else f"layer_types: {', '.join(sorted(kinds))}"
    if native:
        level, fix = "review", f"serve MAX's own {native[0].name}; a port of it is not supported"
    else:
        level, fix = "stop", "wait for support, or port by hand from one of these"
    with_state = ", ".join(_slugs_with_state())
    yield Wall(
        "stop" if level == "stop" else "review",
        "state",
        f"a recurrent state per sequence ({evidence})",
        f"MAX {max_version()}'s paged cache holds keys and values; only these architectures "
        f"keep other state: {with_state}",
        fix,
    )


@cache
def _slugs_with_state() -> tuple[str, ...]:
    """Slugs whose registration asks for recurrent state (`checkpoints_recurrent_state=True`)."""
    found = []
    for slug in dict.fromkeys(arch.slug for arch in native_archs()):
        path = module_path(f"{ARCHITECTURES}.{slug}.arch")
        if path and "checkpoints_recurrent_state=True" in path.read_text("utf-8"):
            found.append(slug)
    return tuple(found)


def _gpu_only(opened: Checkpoint, devices: Devices) -> Iterator[Wall]:
    if devices.kind != "cpu":
        return
    expert = next((name for name in opened.tensors if _EXPERT_KEY.search(name)), None)
    if expert:
        yield Wall(
            "review",
            "device",
            f"routed experts ({expert})",
            "MAX's expert kernels (moe_create_indices, grouped_matmul_ragged) run on GPUs only",
            "on this CPU a port can be emitted and evaluated, but not served",
        )
    if opened.config.get("kv_lora_rank"):
        yield Wall(
            "review",
            "device",
            "latent attention (config.json: kv_lora_rank)",
            "MAX's latent-attention kernels run on GPUs only",
            "on this CPU a port can be emitted and evaluated, but not served",
        )


def _tokenizer(opened: Checkpoint) -> Iterator[Wall]:
    files = set(opened.tokenizer_files)
    if not files:
        yield Wall(
            "review",
            "tokenizer",
            "a tokenizer to serve text",
            "the checkpoint has no tokenizer files",
            "copy them from the model's original checkpoint; logits can be verified without",
        )
        return
    settings = opened.read_json("tokenizer_config.json") or {}
    if _auto_tokenizer(settings):
        yield Wall(
            "review",
            "tokenizer",
            "its own tokenizer code (tokenizer_config.json: auto_map)",
            "MAX loads tokenizers through transformers, which runs that code only when told to",
            "pass --trust-remote-code to maxport and to max serve",
        )
    elif "tokenizer.json" not in files:
        slow = sorted(f for f in files if f.endswith((".model", ".tiktoken", "tekken.json")))
        needed = {"tiktoken" if "tiktoken" in f else "sentencepiece" for f in slow}
        missing = sorted(name for name in needed if find_spec(name) is None)
        if slow and missing:
            yield Wall(
                "review",
                "tokenizer",
                f"a tokenizer stored as {slow[0]}, without tokenizer.json",
                f"{', '.join(missing)} is not installed",
                f"pip install {' '.join(missing)}",
            )


def _auto_tokenizer(settings: Mapping[str, Any]) -> bool:
    auto_map = settings.get("auto_map")
    return isinstance(auto_map, Mapping) and "AutoTokenizer" in auto_map


def _memory(opened: Checkpoint, devices: Devices) -> Iterator[Wall]:
    if devices.memory is None or not opened.tensors:
        return
    need = estimate(opened, devices.kind)
    where = f"{devices.count} x {devices.name} with {size_text(devices.memory)} each"
    text = f"{size_text(need.weights)} of weights"
    if need.weights > devices.memory * devices.count:
        yield Wall(
            "stop", "memory", text, where, "use more or larger devices, or a smaller encoding"
        )
    elif need.weights > devices.memory:
        shards = -(-need.weights // devices.memory)
        yield Wall(
            "review",
            "memory",
            text,
            f"one device has {size_text(devices.memory)}",
            f"shard over at least {shards} devices (tensor parallel)",
        )
    elif need.cache_per_token and need.context:
        left = devices.memory * devices.count - need.weights
        fits = left // need.cache_per_token
        if fits < need.context:
            yield Wall(
                "review",
                "memory",
                f"{text} and {size_text(need.cache_per_token * need.context)} of KV cache for "
                f"one sequence of {need.context} tokens",
                where,
                f"serve with --max-length {fits} or less",
            )
