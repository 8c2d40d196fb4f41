"""`maxport doctor`: what is here, what is missing, exit codes."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest
from click.testing import CliRunner

from maxport.cli import cli


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["doctor", *arguments])
    return result.exit_code, result.output


def test_a_complete_machine_passes(valid: Any) -> None:
    code, text = run("--json")
    found = valid("doctor", text)
    assert (code, found["problems"]) == (0, [])
    rows = {row["package"]: row for row in found["versions"]}
    assert rows["max"]["installed"] == importlib.metadata.version("max")
    assert rows["torch"]["ok"] and rows["python"]["ok"]
    assert found["devices"][0].startswith("cpu")
    assert found["memory_free_bytes"] > 0
    assert {cache["name"] for cache in found["caches"]} == {"maxport", "MAX", "Hugging Face"}


def test_the_table_is_for_people() -> None:
    code, text = run()
    assert code == 0
    assert "transformers" in text and "everything that maxport needs is here" in text


def test_a_wrong_or_missing_package_is_a_problem_with_a_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "gguf":
            raise importlib.metadata.PackageNotFoundError(name)
        return "27.1.0" if name == "max" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, text = run("--json")
    found = json.loads(text)
    assert code == 1
    fixes = {problem["what"]: problem["fix"] for problem in found["problems"]}
    (max_problem,) = [what for what in fixes if what.startswith("max ")]
    assert "27.1.0 is installed" in max_problem
    assert fixes[max_problem].startswith('pip install "max')
    assert any(what.startswith("gguf") and "not installed" in what for what in fixes)
    code, text = run()
    assert code == 1 and "wrong version" in text


def test_caches_show_their_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "entry").write_bytes(b"x" * 2048)
    monkeypatch.setenv("MAXPORT_CACHE", str(tmp_path))
    found = json.loads(run("--json")[1])
    (mine,) = [cache for cache in found["caches"] if cache["name"] == "maxport"]
    assert (mine["path"], mine["bytes"], mine["writable"]) == (str(tmp_path), 2048, True)
