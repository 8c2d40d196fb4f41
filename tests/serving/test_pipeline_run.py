"""MAX's own pipeline with a port: the port answers, and its logits are the reference's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from maxport.engine.pipeline_run import PipelineRun
from maxport.errors import MaxportError

PORT = Path(__file__).parents[1] / "fixtures" / "ports" / "helium"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Helium with a tokenizer of one token per word."""
    from tokenizers import Tokenizer, models
    from transformers import HeliumConfig, HeliumForCausalLM, PreTrainedTokenizerFast

    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 80, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = HeliumConfig(**sizes, **heads, max_position_embeddings=256)
    HeliumForCausalLM(config).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(500)}, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    fast.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.compiled
def test_the_port_answers_with_the_references_logits(model: Path) -> None:
    from maxport.verify.reference import load_reference

    run = PipelineRun(PORT, model, max_length=64)
    assert type(run.pipeline._pipeline_model).__module__ == "helium.model"
    ids = [5, 6, 7, 300, 20]
    expected = load_reference(model).logits(ids)[-1]
    np.testing.assert_allclose(run.logits(ids)[0], expected, atol=1e-4)


def test_a_port_that_does_not_load_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "helium"}))
    with pytest.raises(MaxportError, match="does not load the port"):
        PipelineRun(PORT, tmp_path)
