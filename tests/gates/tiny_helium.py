"""A tiny Helium checkpoint, and ports made from the hand-written one by one edit each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

FIXTURE = Path(__file__).parents[1] / "fixtures" / "ports" / "helium"

CONFIG: dict[str, Any] = {
    "architectures": ["HeliumForCausalLM"],
    "model_type": "helium",
    "dtype": "float32",
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-8,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 500,
}

LAYER = {
    "input_layernorm": (64,),
    "post_attention_layernorm": (64,),
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (80, 64),
    "mlp.up_proj": (80, 64),
    "mlp.down_proj": (64, 80),
}


def tensors(**more: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Random weights of the tiny Helium, and more tensors by name and shape."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (500, 64), "model.norm.weight": (64,)}
    shapes |= {"lm_head.weight": (500, 64)}
    for i in range(2):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in LAYER.items()}
    shapes |= more
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def checkpoint(
    folder: Path,
    arrays: dict[str, np.ndarray] | None = None,
    *,
    drop: tuple[str, ...] = (),
    stored: str = "",
    **config: Any,
) -> Path:
    """A checkpoint folder without tokenizer; tensors are stored as config's `dtype` says."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    arrays = tensors() if arrays is None else arrays
    kept = {name: array for name, array in arrays.items() if name not in drop}
    write(folder / "model.safetensors", kept, stored or config.get("dtype", "float32"))
    return folder


def write(path: Path, arrays: dict[str, np.ndarray], dtype: str) -> None:
    """A safetensors file; bfloat16 is the upper half of float32."""

    def data(array: np.ndarray) -> bytes:
        if dtype == "bfloat16":
            return (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return array.astype(dtype).tobytes()

    header, blobs, at = {}, [], 0
    for name, array in arrays.items():
        blobs.append(data(array))
        header[name] = {
            "dtype": {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at := at + len(blobs[-1])],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def port(folder: Path, **edits: tuple[str, str]) -> Path:
    """A copy of the hand-written port; each edit replaces text in a file (`arch` is arch.py)."""
    shutil.copytree(FIXTURE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in edits.items():
        file = folder / ("__init__.py" if name == "init" else f"{name}.py")
        text = file.read_text()
        assert old in text, f"{old!r} is not in {name}"
        file.write_text(text.replace(old, new))
    return folder
