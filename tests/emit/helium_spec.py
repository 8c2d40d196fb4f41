"""The spec of the hand-written port in tests/fixtures/ports/helium."""

from __future__ import annotations

from pathlib import Path

from maxport.emit.spec import ConfigField, Fuse, KVCache, PortSpec, Tie

FIXTURE = Path(__file__).parents[1] / "fixtures" / "ports" / "helium"

LAYER = "model.layers.{i}"


def _fuse(target: str, sources: tuple[str, ...], kind: str) -> Fuse:
    return Fuse(tuple(f"{LAYER}.{source}.{kind}" for source in sources), f"{LAYER}.{target}.{kind}")


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

HELIUM = PortSpec(
    slug="helium",
    class_name="HeliumForCausalLM",
    graph_class="HeliumForCausalLM",
    config_class="HeliumConfig",
    display_name="Helium",
    hf_class="HeliumForCausalLM",
    hf_file="modeling_helium.py",
    transformers_version="5.12.1",
    config_fields=(
        ConfigField("vocab_size", "int", "hf.vocab_size", "Rows of the embedding and the head."),
        ConfigField("hidden_size", "int", "hf.hidden_size", "Width of the residual stream."),
        ConfigField(
            "intermediate_size", "int", "hf.intermediate_size", "Width of the MLP's gated layer."
        ),
        ConfigField(
            "num_hidden_layers", "int", "hf.num_hidden_layers", "Number of decoder layers."
        ),
        ConfigField(
            "num_attention_heads", "int", "hf.num_attention_heads", "Query heads of a layer."
        ),
        ConfigField(
            "num_key_value_heads",
            "int",
            "hf.num_key_value_heads",
            "Key and value heads of a layer.",
        ),
        ConfigField("head_dim", "int", "hf.head_dim", "Width of one attention head."),
        ConfigField(
            "rms_norm_eps",
            "float",
            "hf.rms_norm_eps",
            "Added to the mean square in every RMS norm.",
        ),
        ConfigField(
            "rope_theta",
            "float",
            'hf.rope_parameters["rope_theta"]',
            "Base of the rotary frequencies.",
        ),
        ConfigField(
            "attention_bias",
            "bool",
            "hf.attention_bias",
            "Whether the query, key and value projections have biases.",
        ),
        ConfigField(
            "mlp_bias", "bool", "hf.mlp_bias", "Whether the MLP's projections have biases."
        ),
        ConfigField(
            "tie_word_embeddings",
            "bool",
            "hf.tie_word_embeddings",
            "Whether the head is the token embedding; the checkpoint's tensors decide.",
        ),
    ),
    parameters=(
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(
            f"{LAYER}.{name}"
            for name in (
                "input_layernorm.weight",
                "mlp.down_proj.bias",
                "mlp.down_proj.weight",
                "mlp.gate_up_proj.bias",
                "mlp.gate_up_proj.weight",
                "post_attention_layernorm.weight",
                "self_attn.o_proj.weight",
                "self_attn.qkv_proj.bias",
                "self_attn.qkv_proj.weight",
            )
        ),
    ),
    weight_rules=(
        _fuse("self_attn.qkv_proj", QKV, "weight"),
        _fuse("self_attn.qkv_proj", QKV, "bias"),
        _fuse("mlp.gate_up_proj", GATE_UP, "weight"),
        _fuse("mlp.gate_up_proj", GATE_UP, "bias"),
        Tie("lm_head.weight", "model.embed_tokens.weight"),
    ),
    kv_cache=KVCache(),
    example_repo_ids=("kyutai/helium-1-2b",),
)
