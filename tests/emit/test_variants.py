"""Configurations whose structure their family's own does not show; bench/variants.py has many."""

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

#: Family, configuration, and what the port must say because of it.
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    # Queries, keys and values of one group lie together: heads per group and two more.
    "grouped heads": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 8,
            "num_attention_heads": 128,
            "hidden_size": 8192,
        },
        "self.num_attention_heads // self.num_kv_heads + 2",
    ),
    # One class of norm, over the heads of queries here and of keys there.
    "norms of two shapes": (
        "cohere",
        {"use_qk_norm": True, "num_key_value_heads": 8},
        "Tensor.zeros([config.num_key_value_heads, config.head_dim])",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_ported_and_equal(variant: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    family, changes, said = VARIANTS[variant]
    config = CONFIG_MAPPING[family](**changes)
    port = make_port(config, slug="variant_port")
    assert said in port.files["variant_port.py"]
    folder = write_port(tmp_path, "variant_port", port.files)
    small = twin_config(config, 2)
    checkpoint = save_twin(small, tmp_path / "checkpoint")
    runner, model = EvaluatedRunner(build_port(folder, checkpoint)), twin_model(small)
    tokens = np.random.default_rng(1).integers(3, small.vocab_size - 1, 20)
    got = np.concatenate([runner.step({0: piece})[0] for piece in np.split(tokens, [9, 14, 15])])
    import torch

    with torch.no_grad():
        want = model(torch.tensor(tokens[None])).logits[0].numpy()
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()
