"""The native bench's bookkeeping: rows, resumption, the table, and where it looks for causes."""

import importlib.util
import json
import sys
from pathlib import Path

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


def test_a_schedule_feeds_every_token_once_and_in_order(native_row):
    fed = {key: [] for key in range(len(native_row.LENGTHS))}
    for step in native_row.SCHEDULE:
        for key, (begin, end) in step.items():
            fed[key] += range(begin, end)
    assert all(fed[key] == list(range(size)) for key, size in enumerate(native_row.LENGTHS))
