"""Ports that start as a donor: MAX can import them, and they say that they are not finished."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

import maxport.cli
from maxport.children import child_environment
from maxport.cli.scaffold import command
from maxport.errors import MaxportError
from maxport.plan.max_source import max_root
from maxport.scaffold import scaffold

CONFIG = {
    "architectures": ["HeliumForCausalLM"],
    "model_type": "helium",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
}

#: V3 and V2 donors; phi3_modulev3 runs another package's graph, qwen3 has a planner of its own.
DONORS = ("llama3_modulev3", "olmo3", "phi3_modulev3", "qwen3", "llama3")

PROBE = """
import json, sys
from maxport.engine.port_probe import main
for arguments in json.load(open(sys.argv[1])):
    main(arguments)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(scope="module")
def ports(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """A skeleton and a full copy of every donor."""
    root = tmp_path_factory.mktemp("ports")
    return {
        (donor, copy): scaffold(
            model,
            donor,
            root,
            slug=f"{'copy' if copy else 'sub'}_{donor}",
            full_copy=copy,
            measure=False,
        ).folder
        for donor in DONORS
        for copy in (False, True)
    }


def test_max_imports_every_scaffold_and_the_port_answers(
    ports: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    runs = [
        [str(p), "HeliumForCausalLM", str(tmp_path / f"{p.name}.jsonl")] for p in ports.values()
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, "-c", PROBE, str(tmp_path / "runs.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=child_environment())
    for _port, _name, out in runs:
        lines = [json.loads(line) for line in Path(out).read_text().splitlines()]
        ended = {line["step"]: line for line in lines if line["state"] != "begin"}
        assert ended["import"]["state"] == "ok", ended["import"]
        assert ended["registry"]["default"]["port"], ended["registry"]
        (arch,) = ended["arch"]["architectures"]
        assert arch["planner"] and arch["shared_with"] == []


def keywords(file: Path) -> dict[str, str]:
    """Arguments of the first SupportedArchitecture in a file, without module prefixes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SupportedArchitecture":
            return {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
    raise AssertionError(f"{file} registers nothing")


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("donor", DONORS)
def test_every_argument_of_the_donor_is_carried_over(
    donor: str, copy: bool, ports: dict[tuple[str, bool], Path]
) -> None:
    theirs = keywords(max_root() / "pipelines" / "architectures" / donor / "arch.py")
    ours = keywords(ports[donor, copy] / "arch.py")
    assert set(ours) == set(theirs)
    assert ours["memory_planner"] == theirs["memory_planner"]
    assert ours["name"] == "'HeliumForCausalLM'"


def test_docstrings_do_not_claim_that_the_port_is_finished(
    ports: dict[tuple[str, bool], Path],
) -> None:
    for (donor, copy), folder in ports.items():
        doc = ast.get_docstring(ast.parse((folder / f"{folder.name}.py").read_text())) or ""
        assert "NOT YET" in doc and donor in doc, (donor, copy, doc)


def test_measured_differences_become_todos(model: str, tmp_path: Path) -> None:
    arguments = [model, "--start-from", "llama3_modulev3", "-o", str(tmp_path), "--json"]
    result = CliRunner().invoke(command, [*arguments, "--with-tests"])
    report = json.loads(result.stdout)
    schema = Path(maxport.cli.__file__).parent / "schemas" / "scaffold.json"
    jsonschema.validate(report, json.loads(schema.read_text()))
    source = (tmp_path / "helium" / "helium.py").read_text()
    components = [delta["component"] for delta in report["deltas"]]
    assert "attention query" in components and source.count("# TODO") == len(components)
    assert "adjacent" in source and "modeling_helium.py" in source
    test_file = tmp_path / "helium" / "tests" / "test_helium.py"
    assert "verify_port" in test_file.read_text()
    ast.parse(test_file.read_text())


def test_a_native_class_gets_the_suffix(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    changed = {**CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(changed))
    made = scaffold(str(folder), "olmo3", tmp_path / "out", measure=False)
    assert made.name == "LlamaForCausalLM_ModuleV3"


def test_bad_input(model: str, tmp_path: Path) -> None:
    with pytest.raises(MaxportError, match="no architecture folder 'lama3'"):
        scaffold(model, "lama3", tmp_path)
    with pytest.raises(MaxportError, match="cannot be the name of a port"):
        scaffold(model, "olmo3", tmp_path, slug="my-port")
    scaffold(model, "olmo3", tmp_path, measure=False)
    with pytest.raises(MaxportError, match="--force"):
        scaffold(model, "olmo3", tmp_path, measure=False)
    assert "Example:" in CliRunner().invoke(command, ["--help"]).output
