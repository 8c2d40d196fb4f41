"""`maxport verify`: table, JSON, page, exit codes, bad input."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from maxport.cli import cli
from maxport.errors import MaxportError

PORT = Path(__file__).parent.parent / "fixtures" / "ports" / "helium"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["verify", *map(str, arguments)], catch_exceptions=True)


def refused(*arguments: object) -> MaxportError:
    result = run(*arguments)
    assert isinstance(result.exception, MaxportError), result.output
    return result.exception


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint folder with a config and no weights."""
    from maxport.twin import default_config

    folder = tmp_path_factory.mktemp("helium-config")
    config = default_config("helium")
    config.architectures = ["HeliumForCausalLM"]
    config.save_pretrained(folder)
    yield folder


def test_without_weights_a_twin_is_judged_and_the_report_says_so(
    config_only: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    result = run(config_only, "--port-dir", PORT, "--steps", 3, "--html", page)
    assert result.exit_code == 0, result.output
    assert "verdict: equal" in result.output
    assert "the checkpoint has no weights" in result.output
    text = page.read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert text.count("<svg") == 6
    assert "http://" not in text and "https://" not in text and "<script" not in text
    assert "Verdict: <span class='equal'>equal</span>" in text
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_wrong_port_exits_with_1_and_json_carries_the_numbers(
    config_only: Path, tmp_path: Path, valid: Any
) -> None:
    port = tmp_path / "helium"
    shutil.copytree(PORT, port)
    graph = port / "helium.py"
    graph.chmod(0o644)
    graph.write_text(graph.read_text("utf-8").replace("F.silu(gate) * up", "F.silu(up) * gate"))
    result = run(config_only, "--port-dir", port, "--steps", 2, "--json")
    assert result.exit_code == 1
    body = valid("verify", result.output)
    assert (body["verdict"], body["weights"], body["engine"]) == ("differs", "twin", "evaluate")
    assert body["max_diff"] > body["tolerance"] > 0
    assert body["rows"][0]["worst"][0]["expected"] != body["rows"][0]["worst"][0]["found"]


def test_a_broken_port_exits_with_1(config_only: Path, tmp_path: Path) -> None:
    port = tmp_path / "broken"
    port.mkdir()
    (port / "__init__.py").write_text("raise RuntimeError('no')\n")
    result = run(config_only, "--port-dir", port)
    assert result.exit_code == 1
    assert "verdict: cannot-load" in result.output
    assert "RuntimeError: no" in result.output


def test_bad_input_is_one_clear_error(config_only: Path, tmp_path: Path) -> None:
    assert "say what to judge" in refused(config_only).what
    assert "say what to judge" in refused(config_only, "--port-dir", PORT, "--native", "v3").what
    assert refused(tmp_path / "nowhere", "--port-dir", PORT).code == 2
    page = tmp_path / "page.html"
    page.write_text("mine")
    error = refused(config_only, "--port-dir", PORT, "--html", page)
    assert "already exists" in error.what and "--force" in error.fix
    assert page.read_text() == "mine"
    assert "is a folder" in refused(config_only, "--port-dir", PORT, "--html", tmp_path).what
    missing = tmp_path / "no" / "page.html"
    assert "does not exist" in refused(config_only, "--port-dir", PORT, "--html", missing).what


def test_help_has_an_example() -> None:
    text = run("--help").output
    assert "Example: maxport verify" in text
    assert "Exit code 0: equal" in text
