"""`maxport plan`: what it says of a checkpoint, on which evidence, and its errors."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import save_file

from maxport.checkpoint import open_checkpoint
from maxport.cli.plan import command
from maxport.errors import MaxportError
from maxport.plan.memory import Devices
from maxport.plan.planning import distribution

transformers.logging.set_verbosity_error()
GIB = 2**30


def write_config(folder: Path, model_type: str, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.AutoConfig.for_model(model_type, **fields).to_dict()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


@pytest.fixture(scope="module")
def smollm3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {"num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4}
    folder = tmp_path_factory.mktemp("plan") / "smollm3"
    return write_config(folder, "smollm3", architectures=["SmolLM3ForCausalLM"], **fields)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command, list(arguments), catch_exceptions=True)


def test_a_plan_names_donor_deltas_and_source_lines(smollm3: Path) -> None:
    done = run(str(smollm3), "--json", "--device", "cpu")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.output)
    schema = resources.files("maxport.cli") / "schemas" / "plan.json"
    jsonschema.validate(plan, json.loads(schema.read_text()))
    assert plan["architecture"] == plan["traced"] == "SmolLM3ForCausalLM"
    assert plan["native"] == []
    scores = [row["score"] for row in plan["donors"]]
    assert plan["donor"] == plan["donors"][0] and scores == sorted(scores)
    # SmolLM3 leaves out the rotary embedding of every fourth layer.
    removed = [d for d in plan["deltas"] if d["change"].startswith("remove rotary embedding")]
    assert {d["component"] for d in removed} == {"attention query", "attention key"}
    assert all(d["kinds"] == ["layer kind 2"] for d in removed)
    assert {row["key"] for row in plan["config"]} >= {"no_rope_layers", "hidden_size"}
    assert plan["donor"]["slug"] in plan["paragraph"]
    assert plan["lane"]["choice"] == "v3"


def test_a_plan_is_written_as_markdown_and_not_overwritten(smollm3: Path, tmp_path: Path) -> None:
    target = tmp_path / "PLAN.md"
    assert run(str(smollm3), "--output", str(target)).exit_code == 0
    text = target.read_text()
    for heading in ("# Plan: SmolLM3ForCausalLM", "## Donors", "## Deltas", "## Configuration"):
        assert heading in text
    again = run(str(smollm3), "--output", str(target))
    assert isinstance(again.exception, MaxportError) and "exists" in str(again.exception)
    assert target.read_text() == text
    assert [f.name for f in tmp_path.iterdir()] == ["PLAN.md"]


def test_a_chosen_donor_is_compared_and_an_unknown_one_refused(smollm3: Path) -> None:
    plan = json.loads(run(str(smollm3), "--start-from", "olmo2", "--json").output)
    assert plan["donor"]["slug"] == "olmo2"
    changes = {(d["component"], d["change"]) for d in plan["deltas"]}
    assert any(c == "attention norm before" and t.startswith("add RMSNorm") for c, t in changes)
    assert any(c == "attention norm after" and t.startswith("remove") for c, t in changes)
    wrong = run(str(smollm3), "--start-from", "olmoo2")
    assert isinstance(wrong.exception, MaxportError) and "olmo2" in wrong.exception.fix


def test_a_native_model_is_told_how_to_serve_it(tmp_path: Path) -> None:
    folder = write_config(
        tmp_path / "olmo2", "olmo2", architectures=["Olmo2ForCausalLM"], num_hidden_layers=16
    )
    plan = json.loads(run(str(folder), "--json").output)
    assert plan["donor"]["distance"] == 0 and plan["deltas"] == []
    assert {row["slug"] for row in plan["native"]} == {"olmo2", "olmo2_modulev3"}
    assert "max serve" in plan["paragraph"]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    fields = {"num_hidden_layers": 2, "num_key_value_heads": 8, "hidden_size": 1024}
    folder = write_config(tmp_path / "w", "llama", architectures=["LlamaForCausalLM"], **fields)
    save_file(
        {"a.weight": torch.zeros(1024, 1024, dtype=torch.bfloat16)}, folder / "model.safetensors"
    )
    return folder


def test_distribution_follows_bytes_and_memory(weights: Path) -> None:
    opened = open_checkpoint(str(weights))
    one = distribution(opened, Devices("gpu", 1, 8 * GIB, "GPU"))
    assert (one.shape, one.degree) == ("one device", 1)
    tight = Devices("gpu", 2, 2 * 2**20, "GPU")
    several = distribution(opened, tight)
    assert several.degree == 4 and "this machine has 2" in several.why
    unknown = distribution(opened, Devices("gpu", 1, None, "GPU"))
    assert unknown.shape == "unknown" and "could not be read" in unknown.why


def test_help_shows_an_example() -> None:
    assert "Example: maxport plan" in run("--help").output
