"""Every scaling of rotary embedding that transformers has, ported and compared past its boundary.

transformers keeps keys as they were rotated when they came; so it is run with its cache as well,
token by token across the length the model was trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxport.emit.write import write_port
from maxport.engine.build import build_port
from maxport.engine.runner import EvaluatedRunner
from maxport.trace.port import make_port
from maxport.twin import save_twin, twin_config, twin_model

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512, "rope_theta": 500000.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0 + 0.01 * i for i in range(12)],
    "long_factor": [1.0 + 0.8 * i for i in range(12)],
    "partial_rotary_factor": 0.75,
}
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "linear": (
        "llama",
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        ("linear_frequencies",),
    ),
    "llama3": ("llama", LLAMA3, ("llama3_frequencies",)),
    "yarn": (
        "llama",
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 512,
        },
        ("yarn_frequencies", "yarn_factor"),
    ),
    "longrope": ("phi3", LONGROPE, ("longrope_table", "longrope_factor", "rotate_long")),
    "dynamic": (
        "llama",
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        ("default_frequencies",),
    ),
}


def config_of(family: str, rope: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, Phi3Config

    sizes = {
        "hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4,
        "max_position_embeddings": 4096, "vocab_size": 1000, "pad_token_id": 0,
    }  # fmt: skip
    if family == "phi3":
        return Phi3Config(**sizes, original_max_position_embeddings=512, rope_parameters=rope)
    return LlamaConfig(**sizes, rope_parameters=rope)


def stepwise(model: Any, tokens: list[int], first: int) -> np.ndarray:
    """transformers' logits with its cache: `first` tokens at once, then one by one."""
    import torch
    from transformers import DynamicCache

    cache, rows, done = DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for count in [first, *[1] * (len(tokens) - first)]:
            ids = torch.tensor([tokens[done : done + count]])
            positions = torch.arange(done, done + count)[None]
            out = model(ids, position_ids=positions, past_key_values=cache, use_cache=True)
            rows.append(out.logits[0].float().numpy())
            done += count
    return np.concatenate(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_rope(kind: str, tmp_path: Path) -> None:
    family, rope, helpers = KINDS[kind]
    config = config_of(family, rope)
    port = make_port(config, slug=f"{kind}_port")
    assert all(h in port.files[f"{kind}_port.py"] for h in helpers)
    port_dir = write_port(tmp_path, port.spec.slug, port.files)
    small = twin_config(config, 2)
    longest = small.max_position_embeddings
    original = small.rope_parameters.get("original_max_position_embeddings", longest // 2)
    save_twin(small, tmp_path / "checkpoint")
    built = build_port(port_dir, tmp_path / "checkpoint", return_logits="all")
    runner, model = EvaluatedRunner(built), twin_model(small)
    count = min(longest, original + 9)
    assert kind == "dynamic" or original < count
    tokens = np.random.default_rng(3).integers(3, small.vocab_size - 1, count).tolist()
    for first in (min(original - 4, count - 3), count):
        runner.reset()
        pieces = [tokens[:first], *([t] for t in tokens[first:])]
        got = np.concatenate([runner.step({0: piece})[0] for piece in pieces])
        want = stepwise(model, tokens, first)
        assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max(), first
