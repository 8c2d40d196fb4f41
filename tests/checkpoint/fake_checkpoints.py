"""Checkpoint folders made byte by byte, so that tests can make them wrong in one place."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

ITEM = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1, "F8_E4M3": 1}

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

Shapes = dict[str, tuple[str, list[int]]]


def llama_shapes(config: dict[str, Any] = LLAMA, dtype: str = "BF16") -> Shapes:
    """Names, dtypes and shapes of a Llama checkpoint's tensors."""
    wide, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = wide // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [vocab, wide]}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": [wide, wide],
            f"{at}.self_attn.k_proj.weight": [kv, wide],
            f"{at}.self_attn.v_proj.weight": [kv, wide],
            f"{at}.self_attn.o_proj.weight": [wide, wide],
            f"{at}.mlp.gate_proj.weight": [inner, wide],
            f"{at}.mlp.up_proj.weight": [inner, wide],
            f"{at}.mlp.down_proj.weight": [wide, inner],
            f"{at}.input_layernorm.weight": [wide],
            f"{at}.post_attention_layernorm.weight": [wide],
        }
    shapes |= {"model.norm.weight": [wide], "lm_head.weight": [vocab, wide]}
    return {name: (dtype, shape) for name, shape in shapes.items()}


def header_of(shapes: Shapes) -> dict[str, Any]:
    """A correct header: tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in shapes.items():
        end = at + prod(shape) * ITEM[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return header


def write_safetensors(path: Path, header: dict[str, Any] | bytes, size: int | None = None) -> None:
    """A file with this header and `size` zero bytes of data (default: as the header says)."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    if size is None:
        assert isinstance(header, dict)
        ends = [e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"]
        size = max(ends, default=0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        file.truncate(8 + len(body) + size)  # sparse: an 80-layer checkpoint takes no disk


def make_checkpoint(
    folder: Path, config: dict[str, Any] = LLAMA, shapes: Shapes | None = None, shards: int = 1
) -> Path:
    """A Llama checkpoint folder with zero weights, in one file or with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    shapes = llama_shapes(config) if shapes is None else shapes
    if shards == 1:
        write_safetensors(folder / "model.safetensors", header_of(shapes))
        return folder
    names, weight_map = list(shapes), {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        write_safetensors(folder / file, header_of({n: shapes[n] for n in part}))
        weight_map |= dict.fromkeys(part, file)
    index_json = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json))
    return folder
