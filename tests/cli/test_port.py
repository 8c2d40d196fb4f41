"""`maxport port`: the plan is shown and asked about, and what is written with it."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import transformers
from click.testing import CliRunner

from maxport.cli import port

transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("helium")
    fields = {"num_hidden_layers": 3, "architectures": ["HeliumForCausalLM"]}
    config = transformers.AutoConfig.for_model("helium", **fields).to_dict()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def test_a_veto_on_a_terminal_writes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "on_terminal", lambda: True)
    monkeypatch.setattr(port, "_write", lambda *_: pytest.fail("went on"))
    done = CliRunner().invoke(port.command, [str(model), "-o", str(tmp_path / "p")], input="n\n")
    assert done.exit_code == 1 and "Start from " in done.output  # the group makes it 130
    assert "Write the port? [Y/n]: n" in done.output and not (tmp_path / "p").exists()


def test_port_with_tests_and_plan(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "on_terminal", lambda: True)
    where = ["-o", str(tmp_path), "--slug", "planned_helium", "--with-tests", "--yes"]
    done = CliRunner().invoke(port.command, [str(model), *where], catch_exceptions=False)
    assert done.exit_code == 0 and "Write the port?" not in done.output
    folder = tmp_path / "planned_helium"
    document = (folder / "PORT.md").read_text()
    assert "## Plan\n\nStart from " in document and "## Deltas" in document
    assert json.loads((folder / "port.json").read_text())["plan"] in done.output
    test = (folder / "tests" / "test_planned_helium.py").read_text()
    assert test.count("verify_port(") == 1 and "parametrize" in test
    again = [str(model), *where, "--force", "--json"]
    report = json.loads(CliRunner().invoke(port.command, again, catch_exceptions=False).output)
    schema = resources.files("maxport.cli") / "schemas" / "port.json"
    jsonschema.validate(report, json.loads(schema.read_text()))
    assert report["plan"] and "tests/test_planned_helium.py" in report["files"]
