"""Twins: same structure, three small distinct sizes, weights that survive the round trip."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from maxport.errors import MaxportError
from maxport.twin import default_config, save_twin, twin_config, twin_model

transformers.logging.set_verbosity_error()

DENSE = (  # noqa: SIM905
    "apertus arcee bitnet biogpt bloom codegen cohere cohere2 ctrl cwm ernie4_5 exaone4 "
    "falcon gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4 gpt-sw3 gpt2 "
    "gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj granite helium hunyuan_v1_dense "
    "hyperclovax jais2 llama ministral ministral3 mistral modernbert-decoder mpt nanochat "
    "nemotron olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 "
    "stablelm starcoder2 vaultgemma xglm"
).split()
OTHERS = (  # noqa: SIM905
    "mixtral qwen3_moe gpt_oss olmoe granitemoe deepseek_v3 glm4_moe jamba qwen3_next "
    "lfm2 falcon_h1 bert bart llama4_text gemma3n_text"
).split()
# Fields that neither a traced graph nor a weight shape can contain.
INERT = (
    "dropout",
    "pdrop",
    "initializer",
    "init_std",
    "layerdrop",
    "token_id",
    "aux_loss",
    "label",
)
SIZES = (  # noqa: SIM905
    "hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size "
    "vocab_size max_position_embeddings sliding_window"
).split()


def real(model_type: str, **fields: Any) -> PreTrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **fields)


def llama_405b() -> PreTrainedConfig:
    return real(
        "llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        vocab_size=128256,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def numbers(config: PreTrainedConfig) -> dict[str, float]:
    """Every number of a config that can show in a graph, nested ones with a dotted name."""
    found: dict[str, float] = {}

    def visit(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                visit(f"{prefix}{name}.", value)
            elif _is_number(value) and not any(word in name for word in INERT):
                found[prefix + name] = value

    visit("", config.to_dict())
    return {k: v for k, v in found.items() if "label2id" not in k}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("model_type", DENSE)
def test_every_dense_family_has_a_twin_that_runs(model_type: str) -> None:
    config = twin_config(default_config(model_type), 1)
    model = twin_model(config)
    assert not model.training
    assert all(p.dtype == torch.float32 for p in model.parameters())
    ids = list(range(5, 17))
    out = logits(model, ids)
    assert torch.isfinite(out).all()
    assert out.std() > 0.05, "the logits hardly depend on anything"
    assert len(set(out.argmax(-1).tolist())) > 1
    # Causal: a later token changes no earlier logit, and does change its own.
    changed = logits(model, [*ids[:-1], 50])
    assert torch.allclose(out[:-1], changed[:-1], atol=1e-5)
    assert not torch.allclose(out[-1], changed[-1], atol=1e-3)


@pytest.mark.parametrize("model_type", DENSE)
def test_sizes_differ_within_a_twin_and_between_twins(model_type: str) -> None:
    config = default_config(model_type)
    twins = [numbers(twin_config(config, size)) for size in range(3)]
    real_values = numbers(config)
    for twin in twins:
        sizes = {k: v for k, v in twin.items() if k in SIZES}
        assert len(set(sizes.values())) == len(sizes) or _equal_in(sizes, config), sizes
    for name in twins[0]:
        values = [t[name] for t in twins]
        scalar = name.endswith(("eps", "epsilon", "multiplier", "scaling", "theta", "softcapping"))
        if (name in SIZES and values[0] > 1) or (scalar and real_values.get(name)):
            assert len(set(values)) == 3, (name, values)
            assert not scalar or real_values[name] not in values, (name, values)


def _equal_in(sizes: dict[str, float], config: PreTrainedConfig) -> bool:
    """Full attention without a kv field of its own: kv heads are the query heads."""
    clash = {k for a, b in itertools.combinations(sizes, 2) if sizes[a] == sizes[b] for k in (a, b)}
    return clash == {"num_attention_heads", "num_key_value_heads"}


@pytest.mark.parametrize("model_type", OTHERS)
def test_mixtures_hybrids_and_encoders_have_twins_too(model_type: str) -> None:
    config = twin_config(default_config(model_type), 2)
    assert torch.isfinite(logits(twin_model(config), list(range(12)))).all()


def test_a_405b_config_shrinks_without_its_size() -> None:
    config = llama_405b()
    twins = [twin_config(config, size) for size in range(3)]
    assert config.num_hidden_layers == 126, "the real config was changed"
    for twin in twins:
        assert twin.num_hidden_layers == 2
        assert sum(p.numel() for p in twin_model(twin).parameters()) < 2_000_000
        assert twin.rope_parameters["rope_type"] == "llama3"
        assert twin.rope_parameters["original_max_position_embeddings"] <= 32
        assert twin.num_attention_heads % twin.num_key_value_heads == 0
        assert 1 < twin.num_key_value_heads < twin.num_attention_heads
        assert twin.architectures == ["LlamaForCausalLM"]
    for key in ("factor", "low_freq_factor", "high_freq_factor", "rope_theta"):
        assert len({t.rope_parameters[key] for t in twins}) == 3
    groups = [t.num_attention_heads // t.num_key_value_heads for t in twins]
    assert len(set(groups)) == 3, "a repeat count that never changes looks like a constant"


def test_grouped_single_and_full_attention_stay_what_they_are() -> None:
    single = twin_config(real("llama", num_key_value_heads=1))
    assert single.num_key_value_heads == 1
    grouped = twin_config(real("llama", num_key_value_heads=8))
    assert 1 < grouped.num_key_value_heads < grouped.num_attention_heads
    for size in range(3):
        full = twin_config(real("gpt_neox"), size)
        assert twin_model(full).config.num_attention_heads == full.num_attention_heads


def test_layer_kinds_are_kept_once_and_in_order() -> None:
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    config = real("gemma3_text", num_hidden_layers=24, layer_types=kinds)
    assert twin_config(config).layer_types == ["sliding_attention", "full_attention"]
    assert twin_config(config, layers=7).layer_types == kinds[:7]
    deep = twin_config(real("deepseek_v3", num_hidden_layers=61, first_k_dense_replace=3))
    assert (deep.num_hidden_layers, deep.first_k_dense_replace) == (2, 1)
    fields = {"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4}
    jamba = twin_config(real("jamba", **fields))
    assert "attention" in jamba.layers_block_type and "mamba" in jamba.layers_block_type
    hybrid = twin_config(real("bamba", num_hidden_layers=32, attn_layer_indices=[9, 18, 27]))
    assert hybrid.attn_layer_indices == [1]
    assert torch.isfinite(logits(twin_model(hybrid), list(range(12)))).all()


def test_window_and_head_dim_can_be_forced() -> None:
    config = real("mistral", sliding_window=4096)
    assert [twin_config(config, s).sliding_window for s in range(3)] == [5, 6, 7]
    assert [twin_config(config, s, window=128).sliding_window for s in range(3)] == [128, 129, 130]
    assert twin_config(real("mistral", sliding_window=None), window=128).sliding_window is None
    assert [twin_config(config, s, head_dim=64).head_dim for s in range(3)] == [64, 64, 64]


def test_structure_switches_survive() -> None:
    projected = twin_config(real("opt", hidden_size=1024, word_embed_proj_dim=512))
    assert projected.word_embed_proj_dim != projected.hidden_size
    plain = twin_config(real("opt", hidden_size=1024, word_embed_proj_dim=1024))
    assert plain.word_embed_proj_dim == plain.hidden_size
    untied = twin_config(real("gpt2", tie_word_embeddings=False))
    assert not untied.tie_word_embeddings
    model = twin_model(untied)
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    tied = twin_model(twin_config(real("gpt2")))
    assert tied.lm_head.weight is tied.transformer.wte.weight


def test_alibi_head_counts_agree_on_being_powers_of_two() -> None:
    for heads in (32, 112):
        config = real("bloom", hidden_size=heads * 64, n_head=heads)
        counts = [twin_config(config, s).n_head for s in range(3)]
        assert {bin(n).count("1") == 1 for n in counts} == {heads == 32}


def test_integer_scalars_of_a_json_change_too() -> None:
    fields = {"embedding_multiplier": 12, "logits_scaling": 16, "attention_multiplier": 0.0078125}
    config = real("granite", **fields)
    twins = [twin_config(config, s) for s in range(3)]
    for name, value in fields.items():
        assert len({getattr(t, name) for t in twins} | {value}) == 4


def test_quantised_checkpoints_get_plain_twins() -> None:
    config = real("llama", quantization_config={"quant_method": "fp8"})
    assert getattr(twin_config(config), "quantization_config", None) is None


@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn", "longrope", "llama3"])
def test_scaled_rope_keeps_its_type_and_acts_on_short_prompts(rope: str) -> None:
    scaling: dict[str, Any] = {"rope_type": rope, "factor": 4.0}
    if rope in ("yarn", "longrope", "llama3"):
        scaling["original_max_position_embeddings"] = 2048
    if rope == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope == "longrope":
        scaling |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    config = real("llama", rope_theta=10000.0, rope_scaling=scaling, max_position_embeddings=8192)
    twin = twin_config(config)
    assert twin.rope_parameters["rope_type"] == rope
    plain = twin_config(config)
    plain.rope_parameters = {
        "rope_type": "default",
        "rope_theta": twin.rope_parameters["rope_theta"],
    }
    ids = list(range(40))
    scaled, unscaled = logits(twin_model(twin), ids), logits(twin_model(plain), ids)
    assert (scaled - unscaled).abs().max() > 1e-3


def test_weights_are_away_from_what_a_missing_norm_or_bias_would_be() -> None:
    model = twin_model(twin_config(real("gpt2")))
    state = model.state_dict()
    norm = state["transformer.h.0.ln_1.weight"]
    assert 0.5 < norm.mean() < 1.5 and norm.std() > 0.15
    assert state["transformer.h.0.attn.c_attn.bias"].abs().mean() > 0.1
    again = twin_model(twin_config(real("gpt2"))).state_dict()
    assert all(torch.equal(again[k], v) for k, v in state.items())
    other = twin_model(twin_config(real("gpt2")), seed=1).state_dict()
    assert not torch.equal(other["transformer.h.0.ln_1.weight"], norm)


def test_buffers_are_left_alone() -> None:
    config = twin_config(llama_405b())
    ours = dict(twin_model(config).named_buffers())
    plain = dict(transformers.LlamaForCausalLM(config).named_buffers())
    assert ours and all(torch.equal(ours[k], v) for k, v in plain.items())


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "mixtral", "qwen3_moe", "bloom"])
def test_a_saved_twin_loads_back_bit_equal(model_type: str, tmp_path: Path) -> None:
    config = twin_config(default_config(model_type))
    folder = save_twin(config, tmp_path / "twin", seed=3)
    names = {f.name for f in folder.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json"} == names
    assert not list(tmp_path.glob(".twin*")), "the temporary folder was left behind"
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] and written["model_type"] == config.model_type
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = list(range(9))
    assert torch.equal(logits(loaded, ids), logits(twin_model(config, seed=3), ids))


def test_bfloat16_twins_round_the_float32_weights(tmp_path: Path) -> None:
    config = twin_config(default_config("llama"))
    folder = save_twin(config, tmp_path / "half", dtype=torch.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    full = twin_model(config).model.norm.weight
    assert torch.equal(loaded.model.norm.weight, full.to(torch.bfloat16))


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MaxportError, match="not empty"):
        save_twin(twin_config(default_config("llama")), tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_remote_code_is_shrunk_and_travels_with_the_twin(tmp_path: Path) -> None:
    source = Path(transformers.models.llama.modeling_llama.__file__)
    folder = tmp_path / "remote"
    folder.mkdir()
    for kind in ("configuration", "modeling"):
        text = (source.parent / f"{kind}_llama.py").read_text()
        text = text.replace("from ...", "from transformers.").replace("Llama", "Strange")
        text = text.replace('model_type = "llama"', 'model_type = "strange"')
        text = text.replace("configuration_llama", "configuration_strange")
        (folder / f"{kind}_strange.py").write_text(text)
    config = {**llama_405b().to_dict(), "model_type": "strange"}
    config["architectures"] = ["StrangeForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "configuration_strange.StrangeConfig",
        "AutoModelForCausalLM": "modeling_strange.StrangeForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config, default=str))
    loaded = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    twin = twin_config(loaded, 1)
    saved = save_twin(twin, tmp_path / "twin")
    again = transformers.AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    assert type(again).__name__ == "StrangeForCausalLM"
    assert torch.isfinite(logits(again, list(range(9)))).all()


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(MaxportError, match="no model type 'nosuch'"):
        default_config("nosuch")
    with pytest.raises(ValueError, match="size must be"):
        twin_config(default_config("llama"), 3)
    with pytest.raises(MaxportError, match="no causal-LM class"):
        twin_model(transformers.ViTConfig())
    broken = real("llama", hidden_act="no-such-activation")
    with pytest.raises(MaxportError, match="no tiny twin of LlamaConfig") as caught:
        twin_config(broken)
    assert "no-such-activation" in caught.value.where


@st.composite
def decoder_configs(draw: st.DrawFn) -> PreTrainedConfig:
    """Configs as checkpoints have them: any depth, heads, window, rope, flags."""
    model_type = draw(st.sampled_from(["llama", "qwen2", "gemma2", "mistral", "granite", "cohere"]))
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv * draw(st.sampled_from([1, 2, 3, 8]))
    head_dim = draw(st.sampled_from([64, 80, 128]))
    fields: dict[str, Any] = {
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": draw(st.integers(1, 96)),
        "intermediate_size": draw(st.integers(64, 60000)),
        "vocab_size": draw(st.integers(1000, 300000)),
        "rope_theta": draw(st.sampled_from([1e4, 5e5, 1e6])),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": draw(st.sampled_from([None, 0, 999])),
    }
    if model_type in ("mistral", "gemma2"):
        fields["sliding_window"] = draw(st.sampled_from([4096, 32768]))
    if model_type in ("llama", "qwen2"):
        fields["attention_bias"] = draw(st.booleans())
    return real(model_type, **fields)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=decoder_configs(), sizes=st.permutations([0, 1, 2]))
def test_any_checkpoint_config_shrinks_to_distinct_sizes(
    config: PreTrainedConfig, sizes: list[int]
) -> None:
    before = config.to_json_string()
    a, b = twin_config(config, sizes[0]), twin_config(config, sizes[1])
    assert config.to_json_string() == before
    assert type(a) is type(config) and a.tie_word_embeddings == config.tie_word_embeddings
    assert a.num_hidden_layers == b.num_hidden_layers <= config.num_hidden_layers
    for name in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"):
        assert getattr(a, name) != getattr(b, name)
        assert getattr(a, name) < 260
    assert a.num_attention_heads % a.num_key_value_heads == 0
    assert (a.num_key_value_heads == 1) == (config.num_key_value_heads == 1)


def test_a_twin_is_published_with_the_configuration_it_was_made_from(tmp_path: Path) -> None:
    # Falcon's model writes num_ln_in_parallel_attn into its configuration when it is built.
    config = twin_config(transformers.FalconConfig(new_decoder_architecture=True, num_kv_heads=1))
    folder = save_twin(config, tmp_path / "falcon")
    assert config.num_ln_in_parallel_attn is None
    written = json.loads((folder / "config.json").read_text())
    assert written["num_ln_in_parallel_attn"] is None
    assert written["architectures"] == ["FalconForCausalLM"]
    assert written["dtype"] == "float32"
