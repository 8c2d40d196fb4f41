"""The script names that older instructions use run the commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from maxport.children import child_environment

SCRIPTS = Path(__file__).parents[2] / "scripts"
SINGLE = {
    "inspect_hf": "maxport inspect",
    "list_native_archs": "maxport list-archs",
    "list_checkpoint_keys": "maxport list-keys",
    "check_walls": "maxport check-walls",
    "scaffold": "maxport scaffold",
    "run_oss_gates": "maxport gates",
    "compare_layers": "maxport compare",
}
STEPS = ("inspect", "scaffold", "list-archs", "check-walls", "list-keys", "gates", "compare")


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=child_environment()
    )


@pytest.mark.parametrize("name", SINGLE)
def test_single_scripts_are_the_commands(name: str) -> None:
    done = run(name, "--help")
    step = SINGLE[name].split()[1]
    assert done.returncode == 0 and f" {step} " in done.stdout and "Example:" in done.stdout


def test_the_dispatcher_has_every_step_and_no_other() -> None:
    assert run("import_model", "gates", "--help").returncode == 0
    refused = run("import_model", "port")
    assert refused.returncode == 2 and all(step in refused.stderr for step in STEPS)
    assert run("import_model").returncode == 2 and run("import_model", "--help").returncode == 0


def test_exit_codes_and_arguments_are_the_commands_own() -> None:
    assert run("import_model", "list-archs", "--match", "LlamaForCausalLM").returncode == 0
    assert run("list_native_archs", "--match", "NoSuchForCausalLM").returncode == 1
    assert run("run_oss_gates", "./nowhere", "--port-dir", ".").returncode == 2
