"""The judge passes right ports, refuses single faults, and says when it cannot judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from maxport.errors import MaxportError
from maxport.verify import verify_port
from maxport.verify.tolerance import FLOOR

STEPS = 4


def test_a_right_port_is_equal_in_every_check(helium: Path, helium_port: Path) -> None:
    report = verify_port(helium, helium_port, steps=STEPS)
    assert (report.verdict, report.exit_code, report.why) == ("equal", 0, "")
    names = [row.name for row in report.rows]
    assert names == ["ragged", "chunked", "decode", "logits=all", "logits=last", "logits=variable"]
    assert all(row.verdict == "equal" for row in report.rows)
    ragged = report.rows[0]
    assert ragged.positions == ragged.same_token == 184
    assert ragged.tolerance is not None and ragged.max_diff is not None
    assert 0 < ragged.max_diff < ragged.tolerance.value
    assert ragged.tolerance.value == pytest.approx(FLOOR * ragged.tolerance.logit_range)
    assert [len(values) for values in ragged.per_position.values()] == [5, 150, 29]
    assert json.loads(json.dumps(report.to_json()))["versions"]["max"]


@pytest.mark.parametrize("lane", ["v2", "v3"])
def test_maxs_own_llama_is_equal(llama: Path, lane: str) -> None:
    report = verify_port(llama, None, native=lane, steps=STEPS)
    assert report.verdict == "equal", report.why
    # MAX 26.7's ModuleV3 llama does not build in this mode; that is shown and not held against it.
    variable = next(row for row in report.rows if row.name == "logits=variable")
    assert variable.verdict == ("equal" if lane == "v2" else "unsupported")


FAULTS = {
    "eps": ("helium.py", "rms_norm(x, self.weight, self.eps,", "rms_norm(x, self.weight, 1e-6,"),
    "scale": ("helium.py", "scale=self.head_dim**-0.5", "scale=(self.head_dim + 1) ** -0.5"),
    "theta": ("model_config.py", 'hf.rope_parameters["rope_theta"]', "10000.0"),
    "interleave": ("helium.py", "interleaved=True", "interleaved=False"),
    "mask": ("helium.py", "CAUSAL_MASK", "NULL_MASK"),
    "gate and up swapped": ("helium.py", "F.silu(gate) * up", "F.silu(up) * gate"),
    "norm after residual": ("helium.py", "x + self.mlp(self.post", "self.mlp(self.post"),
    "last row off by one": ("helium.py", "row_offsets[1:] - 1", "row_offsets[1:] - 2"),
    "variable rows reversed": ("helium.py", "F.range(n[0], 0, -1,", "F.range(1, n[0] + 1, 1,"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_port_with_one_fault_is_refused(
    fault: str, helium: Path, edited_port: Callable[[str, str, str], Path]
) -> None:
    report = verify_port(helium, edited_port(*FAULTS[fault]), steps=2)
    assert report.verdict == "differs"
    assert report.exit_code == 1
    assert report.why


def test_the_first_difference_is_located(
    helium: Path, edited_port: Callable[[str, str, str], Path]
) -> None:
    port = edited_port("helium.py", "scale=self.head_dim**-0.5", "scale=0.5")
    report = verify_port(helium, port, steps=2)
    # The first token attends to itself alone, so no scale can show there.
    assert "from position 1 of sequence 0 on" in report.why
    assert [row.name for row in report.rows] == ["ragged", "chunked", "decode"]


def test_a_port_that_does_not_load_is_a_verdict(
    helium: Path, llama: Path, helium_port: Path, edited_port: Callable[[str, str, str], Path]
) -> None:
    broken = edited_port("model.py", "module.to(self.devices[0])", "module.nowhere()")
    report = verify_port(helium, broken, steps=2)
    assert (report.verdict, report.exit_code) == ("cannot-load", 1)
    assert "nowhere" in report.why
    wrong = verify_port(llama, helium_port, steps=2)
    assert wrong.verdict == "cannot-load"
    assert "the port is for HeliumForCausalLM" in wrong.why


def test_a_reference_with_missing_weights_is_no_reference(
    helium: Path, helium_port: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "checkpoint"
    shutil.copytree(helium, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    report = verify_port(folder, helium_port)
    assert (report.verdict, report.exit_code) == ("no-reference", 2)
    assert "model.layers.0.mlp.up_proj.weight" in report.why


def test_a_reference_that_is_not_finite_is_no_reference(
    helium: Path, helium_port: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "checkpoint"
    shutil.copytree(helium, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert verify_port(folder, helium_port).why.startswith("the reference's logits are not finite")


def test_the_smoke_tier_is_one_short_prompt(helium: Path, helium_port: Path) -> None:
    report = verify_port(helium, helium_port, tier="smoke")
    assert [(row.name, row.positions, row.verdict) for row in report.rows] == [
        ("smoke", 12, "equal")
    ]


def test_arguments_that_make_no_sense_are_refused(helium: Path, helium_port: Path) -> None:
    with pytest.raises(MaxportError, match="say what to judge"):
        verify_port(helium, None)
    with pytest.raises(MaxportError, match="say what to judge"):
        verify_port(helium, helium_port, native="v3")
    with pytest.raises(MaxportError, match="unknown tier 'all'"):
        verify_port(helium, helium_port, tier="all")
