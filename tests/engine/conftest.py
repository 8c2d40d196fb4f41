"""Tiny checkpoints and the hand-written Helium port, shared by the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

PORTS = Path(__file__).parent.parent / "fixtures" / "ports"


def save_model(model_class: str, folder: Path, **config: object) -> Path:
    """A random transformers model with weights large enough for every layer to matter."""
    import torch
    import transformers

    cls = getattr(transformers, model_class)
    torch.manual_seed(0)
    model = cls(cls.config_class(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


SIZES = {
    "vocab_size": 97,
    "hidden_size": 120,  # Helium wants heads x head_dim
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-2,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), **SIZES)


@pytest.fixture(scope="session")
def helium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("HeliumForCausalLM", tmp_path_factory.mktemp("helium"), **SIZES)


@pytest.fixture(scope="session")
def helium_port() -> Path:
    return PORTS / "helium"
