"""Faults that reading the port's source or the checkpoint's files shows; no MAX import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_helium import FIXTURE, checkpoint, port, tensors

from maxport.checkpoint import Checkpoint, open_checkpoint
from maxport.errors import MaxportError
from maxport.gates import arch, docstrings, import_smoke, lint, preflight, tied
from maxport.gates.base import GateResult, Port, Step, Subject


def subject(
    folder: Path,
    model: Checkpoint | None = None,
    trouble: MaxportError | None = None,
    **config: object,
) -> Subject:
    config = {"model_type": "helium", **config} if model is None else dict(model.config)
    return Subject(Port(folder), "HeliumForCausalLM", config, model, trouble, {})


def told(result: GateResult) -> str:
    return " | ".join(f"{f.what} @ {f.where} -> {f.fix}" for f in result.findings)


LAYERS = """ModuleList(
            HeliumDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )"""
PLAIN = "[HeliumDecoderLayer(config, i) for i in range(config.num_hidden_layers)]"
SPLIT = "gate, up = self.gate_up_proj(x).split([self.width, self.width], axis=-1)"
CONSTANT = "(self.layer, DType.uint32, device=CPU())"
LEAVES = "(kv,) = tree.leaves(kv_tree, leaf=KVCacheInputsPerDevice)"
UPSTREAM = "kv = PagedCacheValues.from_upstream(kv_tree, tokens.mapping)"
MOVE = "module.to(self.devices[0])"
JOIN = "np.concatenate([elements(weight) for weight in weights])"
JOIN_NUMPY = "np.concatenate([np.from_dlpack(weight.data) for weight in weights])"
THETA = 'hf.rope_parameters["rope_theta"]'
DEFAULT = 'getattr(hf, "rope_theta", 10000.0)'

#: Message, file, text, what replaces it.
LINT = (
    ("ops.constant without device=", "helium", f"F.constant{CONSTANT}", "ops.constant(self.layer)"),
    ("not a DeviceRef", "helium", ".to(x.device)", ".to(DeviceRef.CPU())"),
    ("the Tensor 'x' is unpacked", "helium", SPLIT, "gate, up = x"),
    ("'tokens' is unpacked", "helium", "embed_tokens(tokens)", "f([t for t in tokens])"),
    ("ModuleList(*layers)", "helium", LAYERS, f"ModuleList(*{PLAIN})"),
    ("is a plain list of modules", "helium", LAYERS, PLAIN),
    ("has no from_upstream", "helium", LEAVES, UPSTREAM),
    ("self.last is set while", "helium", "freqs_cis = F.cast", "self.last = F.cast"),
    ("strict=False", "model", MOVE, "module.load_state_dict({}, strict=False)"),
    ("always gives 10000.0", "model_config", THETA, DEFAULT),
    ("races with the graph", "model", MOVE, "Buffer.zeros((1,), DType.float32, CPU())"),
    ("through numpy, which has no bfloat16", "weight_adapters", JOIN, JOIN_NUMPY),
)


@pytest.mark.parametrize(("message", "name", "old", "new"), LINT)
def test_lint_names_each_trap_and_its_line(
    message: str, name: str, old: str, new: str, tmp_path: Path
) -> None:
    broken = port(tmp_path / "helium", **{name: (old, new)})
    result = lint.check(subject(broken))
    finding = next((f for f in result.findings if message in f.what), None)
    assert finding is not None, told(result)
    file, line = finding.where.split(":")
    assert file == f"{name}.py" and finding.fix
    assert new in (broken / file).read_text().splitlines()[int(line) - 1]


def test_lint_knows_partial_rotary_from_the_config(tmp_path: Path) -> None:
    whole = lint.check(subject(FIXTURE, rope_parameters={"rope_theta": 1e4}))
    assert whole.passed and not whole.findings
    half = lint.check(subject(FIXTURE, rope_parameters={"partial_rotary_factor": 0.5}))
    assert "silently wrong for partial rotary (0.5)" in told(half)


def test_lint_accepts_a_v2_tensor_moved_to_a_device_ref(tmp_path: Path) -> None:
    folder = tmp_path / "v2"
    folder.mkdir()
    (folder / "graph.py").write_text("from max.graph import DeviceRef\ny = x.to(DeviceRef.CPU())\n")
    assert not lint.check(subject(folder)).findings


DOCS = {
    "lie: 'Llama'": ("helium", "Helium decoder as a MAX", "Llama decoder as a MAX"),
    "lie: 'QK-norm'": ("helium", "a SiLU-gated MLP;", "a SiLU-gated MLP with QK-norm;"),
    "lie: 'multi-GPU'": ("model", "Single-device Helium", "Helium with multi-GPU support"),
    "lie: 'sliding-window'": ("helium", "Causal grouped", "Sliding and sliding-window grouped"),
    "stale: 'Qwen'": ("arch", "helium_arch = ", "# Qwen keeps its planner here\nhelium_arch = "),
}


@pytest.mark.parametrize("message", DOCS)
def test_docstrings_that_describe_another_model(message: str, tmp_path: Path) -> None:
    name, old, new = DOCS[message]
    result = docstrings.check(subject(port(tmp_path / "helium", **{name: (old, new)})))
    assert message in told(result) and not result.passed


def test_true_names_and_claims_are_ok() -> None:
    result = docstrings.check(subject(FIXTURE))
    assert result.passed and not result.findings
    verdicts = {m.phrase: m.verdict for m in docstrings.audit(Port(FIXTURE), "Helium", "helium")}
    assert verdicts["rotary"] == "OK" and verdicts["Single-device"] == "OK"


def test_lineage_and_contrast_are_ok(tmp_path: Path) -> None:
    edits = {
        "helium": ("Helium decoder as", "Helium decoder, rotary as in Cohere, unlike Mistral, as")
    }
    assert docstrings.check(subject(port(tmp_path / "helium", **edits))).passed


def test_a_technique_may_have_the_name_its_configuration_gives_it(tmp_path: Path) -> None:
    folder = port(tmp_path / "helium", helium=("Helium decoder as", "Llama 3.1's scaling in"))
    rope = {"rope_type": "llama3", "rope_theta": 1e4}
    assert docstrings.check(subject(folder, rope_parameters=rope)).passed
    assert not docstrings.check(subject(folder, _name_or_path="meta/llama")).passed


def test_layout_faults(tmp_path: Path) -> None:
    parent = port(tmp_path / "ports" / "helium").parent
    result = import_smoke.check(subject(parent))
    assert "the folder that holds ports was passed" in told(result)
    assert f"pass {parent / 'helium'}" in told(result)
    (tmp_path / "bare").mkdir()
    assert "no __init__.py" in told(import_smoke.check(subject(tmp_path / "bare")))
    assert "no Python package name" in told(import_smoke.check(subject(port(tmp_path / "my-port"))))
    shadowing = import_smoke.check(subject(port(tmp_path / "json")))
    assert "an installed package is called 'json'" in told(shadowing) and "json_port" in told(
        shadowing
    )


def test_syntax_errors_name_the_line(tmp_path: Path) -> None:
    broken = port(
        tmp_path / "helium", arch=("helium_arch = Supported", "helium_arch == = Supported")
    )
    assert "syntax error" in told(import_smoke.check(subject(broken)))
    assert "@ arch.py:" in told(import_smoke.check(subject(broken)))


def test_weight_files(tmp_path: Path) -> None:
    whole = open_checkpoint(str(checkpoint(tmp_path / "whole")), inspect_only=True)
    result = preflight.check(subject(FIXTURE, whole))
    assert result.passed and "21 F32" in result.summary and "no tokenizer" in told(result)
    bare = checkpoint(tmp_path / "bare")
    (bare / "model.safetensors").rename(bare / "pytorch_model.bin")
    model = open_checkpoint(str(bare), inspect_only=True)
    result = preflight.check(subject(FIXTURE, model))
    assert "not in safetensors: pytorch_model.bin" in told(result) and not result.passed


@pytest.mark.parametrize("fault", ["truncated", "missing shard"])
def test_damaged_weight_files(fault: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    file = folder / "model.safetensors"
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        names = dict.fromkeys(tensors(), "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        file.unlink()
    with pytest.raises(MaxportError) as caught:
        open_checkpoint(str(folder), inspect_only=True)
    result = preflight.check(subject(FIXTURE, trouble=caught.value))
    assert not result.passed and "safetensors" in told(result)


def facts(**changes: object) -> dict:
    known = {
        "name": "HeliumForCausalLM",
        "default_encoding": "bfloat16",
        "encodings": ["bfloat16", "float32"],
        "planner": "PagedMemoryPlanner",
        "batching": "Llama3ModuleV3BatchProcessor",
        "pipeline_model": "helium.model.HeliumPipelineModel",
        "kv_cache": True,
        "adapters": ["safetensors"],
        "shared_with": [],
    }
    return {"architectures": [{**known, **changes}]}


def with_facts(folder: Path, known: dict) -> Subject:
    made = subject(FIXTURE, open_checkpoint(str(folder), inspect_only=True))
    return Subject(**{**vars(made), "steps": {"arch": Step("arch", "ok", known)}})


def test_encoding_against_the_stored_dtype(tmp_path: Path) -> None:
    half = checkpoint(tmp_path / "half", dtype="float16")
    result = arch.check(with_facts(half, facts()))
    assert "stored as F16, which HeliumForCausalLM does not serve" in told(result)
    assert not result.passed
    full = checkpoint(tmp_path / "full", dtype="bfloat16", stored="float32")
    result = arch.check(with_facts(full, facts()))
    assert "stored as float32, config.json says bfloat16: MAX plans memory for bfloat16" in told(
        result
    )
    same = checkpoint(tmp_path / "same")
    assert not arch.check(with_facts(same, facts())).findings
    result = arch.check(with_facts(same, facts(encodings=["bfloat16"])))
    assert "MAX casts at load" in told(result) and result.passed
    result = arch.check(with_facts(same, facts(default_encoding="q4_k")))
    assert "none of supported_encodings" in told(result) and not result.passed
    assert not arch.check(with_facts(same, facts(batching=None))).passed


def test_tables_are_found_by_shape_not_by_name() -> None:
    shapes = {"a.weight": (512, 8), "h.0.up": (512, 8), "b": (500, 8), "c": (8, 500), "d": (500,)}
    assert tied.tables(shapes, 500) == ["a.weight", "b"]
