"""`maxport gates`: the real thing once, bad input, and a process that hangs or dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from tiny_helium import FIXTURE, checkpoint

import maxport.cli
from maxport.children import child_environment
from maxport.cli.gates import command
from maxport.errors import MaxportError
from maxport.gates import probe

JSON_SCHEMA = Path(maxport.cli.__file__).parent / "schemas" / "gates.json"


def test_a_correct_port_passes_every_gate(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "maxport",
            "gates",
            str(model),
            "--port-dir",
            str(FIXTURE),
            "--json",
        ],
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=200,
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["passed"], done.stdout
    jsonschema.validate(report, json.loads(JSON_SCHEMA.read_text()))
    gates = [gate["gate"] for gate in report["gates"]]
    assert gates == [
        *("files", "import", "registry", "arch", "build", "weights", "tied head", "lint"),
        "docstrings",
    ]


def test_bad_input(tmp_path: Path) -> None:
    runner = CliRunner()
    for model, port in (
        (str(tmp_path), FIXTURE),
        ("./nowhere", FIXTURE),
        (str(tmp_path), tmp_path / "x"),
    ):
        result = runner.invoke(command, [model, "--port-dir", str(port)])
        assert isinstance(result.exception, MaxportError) and result.exception.code == 2
    assert runner.invoke(command, ["model"]).exit_code == 2
    assert "Example:" in runner.invoke(command, ["--help"]).output


@pytest.mark.parametrize("ending", ["time.sleep(60)", "os._exit(139)"])
def test_a_build_that_hangs_or_dies(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    lines = '{"step": "import", "state": "begin"}\\n{"step": "import", "state": "ok"}\\n'
    lines += '{"step": "build last", "state": "begin"}\\n'
    script.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        f"with open(sys.argv[5], 'w') as out:\n    out.write('{lines}')\n{ending}\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    steps = probe.run_probe(tmp_path, "X", model=None, device="cpu", encoding="float32", limit_s=2)
    assert steps["import"].state == "ok"
    assert steps["build last"].state == "stopped"
    message = steps["build last"].facts["message"]
    assert message in ("not done after 2 s: stopped", "the process ended with code 139")
