"""How much memory a model takes, and what the device has."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxport.checkpoint import Checkpoint

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Devices:
    """What a model would run on: `count` devices of one `kind` with `memory` bytes each.

    `memory` is None if it could not be read.
    """

    kind: str
    count: int
    memory: int | None
    name: str


@dataclass(frozen=True)
class Estimate:
    """Bytes a model takes on its device.

    `weights` in the encoding it runs in; `cache_per_token` of keys and values over all layers;
    `context` the longest sequence its config allows (0 if it names none).
    """

    weights: int
    cache_per_token: int
    context: int


def find_devices(kind: str, count: int | None, memory_gib: float | None) -> Devices:
    """The machine's devices; `kind` "auto" takes GPUs if `nvidia-smi` finds any.

    `count` and `memory_gib` override what is found.
    """
    memory = None if memory_gib is None else int(memory_gib * 2**30)
    if kind in ("auto", "gpu") and (kind == "gpu" or not memory):
        found = _nvidia()
        if found or kind == "gpu":
            sizes = [size for _, size in found]
            name = found[0][0] if found else "GPU"
            return Devices(
                "gpu", count or len(found) or 1, memory or min(sizes, default=None), name
            )
    if memory is None and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Devices("cpu", count or 1, memory, "CPU")


def estimate(opened: Checkpoint, device: str) -> Estimate:
    """Weights and cache of an opened checkpoint on "cpu" (float32) or "gpu" (as stored)."""
    config = opened.config
    text = config.get("text_config")
    if "num_hidden_layers" not in config and isinstance(text, dict):
        config = text
    quantized = bool(opened.config.get("quantization_config"))
    tensors = list(opened.tensors.values())
    if device == "cpu" and not quantized:
        weights, item = sum(tensor.size * 4 for tensor in tensors), 4
    else:
        weights = sum(tensor.nbytes for tensor in tensors)
        item = _BYTES["bfloat16"]
    return Estimate(
        weights, _cache_per_token(config) * item, _int(config, "max_position_embeddings")
    )


def _cache_per_token(config: Mapping[str, Any]) -> int:
    """Cached numbers per token over all layers; 0 if the config does not say."""
    layers = _int(config, "num_hidden_layers", "n_layer")
    latent = _int(config, "kv_lora_rank")
    if latent:
        return layers * (latent + _int(config, "qk_rope_head_dim"))
    heads = _int(config, "num_attention_heads", "n_head")
    width = _int(config, "head_dim") or (
        _int(config, "hidden_size", "n_embd") // heads if heads else 0
    )
    return 2 * layers * (_int(config, "num_key_value_heads") or heads) * width


def _int(config: Mapping[str, Any], *names: str) -> int:
    values = (config.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), 0)


def _nvidia() -> list[tuple[str, int]]:
    """(name, bytes) of each NVIDIA GPU; [] without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return [(name.strip(), int(size) * 2**20) for name, size in rows if size.strip().isdigit()]
