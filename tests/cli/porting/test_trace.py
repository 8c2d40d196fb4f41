"""`maxport trace` shows the graph at each stage, also of models that cannot be ported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import run
from fake_checkpoints import LLAMA, make_checkpoint

MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("stage", "line"), [("traced", "rsqrt"), ("recognised", "rms_norm"), ("ragged", "rms_norm")]
)
def test_the_stages(stage: str, line: str, tmp_path: Path, valid: Any) -> None:
    model = make_checkpoint(tmp_path / "model")
    done = run("trace", model, "--stage", stage, "--module", "model.layers.0", "--json")
    assert done.returncode == 0, done.stderr
    body = valid("trace", done.stdout)
    assert any(line in text for module in body["modules"] for text in module["lines"])
    assert (stage == "traced") == (not body["findings"])


def test_a_mixture_of_experts_is_traced_and_refused(tmp_path: Path, valid: Any) -> None:
    model = make_checkpoint(tmp_path / "model", MIXTRAL, {})
    (model / "model.safetensors").unlink()
    done = run("trace", model, "--json")
    assert done.returncode == 0, done.stderr
    assert any(
        "topk" in line for m in valid("trace", done.stdout)["modules"] for line in m["lines"]
    )
    refused = run("port", model, "-o", tmp_path / "out", "--yes")
    assert refused.returncode == 2 and "topk" in refused.stderr and "\n  fix: " in refused.stderr
    assert not (tmp_path / "out").exists()
