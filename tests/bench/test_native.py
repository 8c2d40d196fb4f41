"""The native bench's bookkeeping: rows, resumption, the table, and where it looks for causes."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def load(name):
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def native():
    return load("native")


@pytest.fixture(scope="module")
def native_row():
    return load("native_row")


ROW = {
    "name": "AForCausalLM v2",
    "device": "cpu",
    "encoding": "float32",
    "verdict": "differs",
    "max_diff": 0.25,
    "tolerance": 1e-5,
    "why": "logits differ | a lot",
}


def test_rows_survive_a_restart_and_the_table_follows(native, tmp_path):
    store = native.Store(tmp_path)
    store.add(ROW)
    again = native.Store(tmp_path)
    assert again.rows["AForCausalLM v2"]["max_diff"] == 0.25
    again.add({**ROW, "name": "BForCausalLM v3", "verdict": "equal", "why": ""})
    content = json.loads((tmp_path / "native.json").read_text())
    assert [row["name"] for row in content["rows"]] == ["AForCausalLM v2", "BForCausalLM v3"]
    assert set(content) == {"bench", "made", "versions", "machine", "rows"}
    table = (tmp_path / "native.md").read_text()
    assert "1 differs; 1 equal" in table
    assert "| AForCausalLM | v2 | differs | cpu float32 | 2.5e-01 | 1.0e-05 |" in table
    assert "logits differ / a lot" in table


def test_a_process_that_dies_costs_one_row(native, monkeypatch):
    """The row at which it died becomes an error; the others run in a new process."""
    calls = []

    def process(rows, cause):
        calls.append(list(rows))
        if ("B", "v2") in rows:
            return [{"name": "A v2", "verdict": "equal"}] if rows[0][
                0
            ] == "A" else [], "exit code 11"
        return [{"name": f"{name} {lane}", "verdict": "equal"} for name, lane in rows], ""

    monkeypatch.setattr(native, "run_process", process)
    rows = list(native.run_batch([("A", "v2"), ("B", "v2"), ("C", "v3")], 0))
    assert [(row["name"], row["verdict"]) for row in rows] == [
        ("A v2", "equal"),
        ("B v2", "error"),
        ("C v3", "equal"),
    ]
    assert len(calls) == 2


def test_a_real_process_failure_is_an_error_with_its_last_line(native, monkeypatch, tmp_path):
    script = tmp_path / "row.py"
    script.write_text("import sys; sys.exit('no such architecture')")
    monkeypatch.setattr(native, "ROW", script)
    done, failure = native.run_process([("A", "v2")], 0)
    assert done == []
    assert failure == "exit code 1: no such architecture"


def test_alternatives_keep_shapes_and_start_with_the_likely(native_row):
    config = {
        "rms_norm_eps": 0.003,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "sliding_window": 6,
        "attention_bias": False,
        "logits_scaling": 3.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "truncate": False, "rope_theta": 500.0
        },
    }  # fmt: skip
    found = list(native_row.alternatives(config))
    assert found[0] == ("rms_norm_eps", 1e-6)
    assert ("sliding_window", 4096) in found
    assert ("attention_bias", True) in found
    assert ("logits_scaling", 1.0) in found
    ropes = [value for key, value in found if key == "rope_parameters"]
    assert {**config["rope_parameters"], "truncate": True} in ropes
    assert {"rope_type": "default", "rope_theta": 500.0} in ropes
    assert all(key not in ("hidden_size", "num_attention_heads") for key, _ in found)


@pytest.mark.parametrize("rates", [None, {"four": 4, "wide": 128}])
def test_a_schedule_feeds_every_token_once_and_in_order(native_row, rates):
    schedule = native_row.past_windows(SimpleNamespace(compress_rates=rates))
    fed = {}
    for step in schedule:
        for key, (begin, end) in step.items():
            fed.setdefault(key, []).extend(range(begin, end))
    assert all(tokens == list(range(len(tokens))) for tokens in fed.values())
    assert schedule[0][0][1] > max((rates or {"": 0}).values())
    assert len(fed[0]) != len(fed[1])


def test_attempts_go_on_until_one_loads_and_refusals_are_named_once(native_row, monkeypatch):
    tried = []

    def judge(name, lane, device, encoding, changes):
        tried.append((device, encoding, *changes))
        why = "quantized weights only" if encoding == "float8_e4m3fn" else "no: quantization"
        return {"verdict": "cannot-load", "why": why, "device": device, "encoding": encoding}

    monkeypatch.setattr(native_row, "judge", judge)
    row = native_row.judge_row("A", "v2", {})
    assert tried == [*native_row.ATTEMPTS, native_row.QUANTIZED[0]]
    assert row["why"] == (
        "no: quantization [cpu float32, gpu float32, gpu bfloat16]; "
        "quantized weights only [gpu float8_e4m3fn]"
    )


def test_what_a_verdict_asks_for_is_given(native_row, monkeypatch):
    def judge(name, lane, device, encoding, changes):
        if native_row.IMAGES not in changes:
            return {"verdict": "cannot-load", "why": "requires a vision_config"}
        return {"verdict": "equal", "why": "", "max_diff": 0.0}

    monkeypatch.setattr(native_row, "judge", judge)
    row = native_row.judge_row("A", "v2", {})
    assert row["verdict"] == "equal"
    assert row["changes"] == {native_row.IMAGES: True}


def test_a_quantized_twin_and_its_reference_hold_the_same_weights(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    twin = load("native_twin")
    folder = tmp_path / "twin"
    folder.mkdir()
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {"layers.0.up_proj.weight": weight, "embed_tokens.weight": weight.clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "a"}))
    twin.quantize(folder)
    stored = load_file(folder / "model.safetensors")
    plain = load_file(twin.reference_of(folder) / "model.safetensors")
    scales = stored["layers.0.up_proj.weight_scale_inv"]
    assert scales.shape == (2, 2)
    whole = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130]
    small = stored["layers.0.up_proj.weight"]
    assert small.dtype == torch.float8_e4m3fn
    assert torch.equal(small.float() * whole, plain["layers.0.up_proj.weight"])
    assert torch.allclose(plain["layers.0.up_proj.weight"], weight.float(), rtol=0.07, atol=1e-2)
    assert torch.equal(stored["embed_tokens.weight"], weight)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert "quantization_config" not in json.loads(
        (twin.reference_of(folder) / "config.json").read_text()
    )


def test_tensors_get_the_names_of_published_checkpoints(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    twin = load("native_twin")
    names = {
        "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight":
            "layers.1.attn.indexer.weights_proj.weight",
        "model.layers.1.self_attn.compressor.indexer.gate_proj.weight":
            "layers.1.attn.indexer.compressor.wgate.weight",
        "model.layers.1.self_attn.compressor.position_bias": "layers.1.attn.compressor.ape",
        "model.layers.1.mlp.shared_experts.gate_proj.weight":
            "layers.1.ffn.shared_experts.w1.weight",
        "model.layers.1.attn_hc.scale": "layers.1.hc_attn_scale",
        "model.hc_head.hc_fn": "hc_head_fn",
        "backbone.embedding.weight": "backbone.embeddings.weight",
    }  # fmt: skip
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    twin.rename_tensors(tmp_path, twin.PUBLISHED_PATTERNS["deepseek_v4"])
    assert set(load_file(tmp_path / "model.safetensors")) == set(names.values())
