"""The skills' format, that their commands exist, and installing them."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

import maxport.cli
from maxport.cli import cli
from maxport.cli.skills import command
from maxport.errors import MaxportError
from maxport.gates import GATES
from maxport.skills import FOLDER, install, skills
from maxport.skills.references import COMMANDS, render_references

ROOT = Path(__file__).parents[2]


def schema() -> dict:
    path = Path(maxport.cli.__file__).parent / "schemas" / "skills.json"
    return json.loads(path.read_text())


def test_each_skill_has_the_agent_skills_format() -> None:
    found = skills()
    assert [skill.name for skill in found] == ["import-model", "migrate-max-v2-to-v3"]
    for skill in found:
        assert skill.name == skill.folder.name and re.fullmatch(r"[a-z0-9-]{1,64}", skill.name)
        assert 0 < len(skill.description) <= 1024
        text = (skill.folder / "SKILL.md").read_text()
        assert text.startswith("---\n") and len(text.splitlines()) < 200
        for link in re.findall(r"\]\(([^)]+)\)", text):
            assert (skill.folder / link).is_file(), link


def commands_in(text: str) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_in_a_skill_exists_with_its_options() -> None:
    import click

    context = click.Context(cli)
    for skill in skills():
        lines = commands_in((skill.folder / "SKILL.md").read_text())
        assert lines
        for line in lines:
            assert line[0] == "maxport" and line[1] in COMMANDS[skill.name]
            known = cli.get_command(context, line[1])
            assert known is not None, line
            options = {name for parameter in known.params for name in parameter.opts}
            assert {part for part in line if part.startswith("-")} <= options, line


def test_references_name_every_command_and_gate() -> None:
    for name, pages in render_references().items():
        committed = (FOLDER / name / "references" / "commands.md").read_text()
        for command_name in COMMANDS[name]:
            assert f"## {command_name}\n" in pages["commands.md"]
            assert f"## {command_name}\n" in committed
    gates = (FOLDER / "import-model" / "references" / "gates.md").read_text()
    assert all(f"- **{name}**: " in gates for name, _gate in GATES)


def test_install_copies_all_and_replaces_only_with_force(tmp_path: Path) -> None:
    target = tmp_path / "agent" / "skills"
    result = CliRunner().invoke(command, ["install", "--dir", str(target), "--json"])
    report = json.loads(result.stdout)
    jsonschema.validate(report, schema())
    assert sorted(os.listdir(target)) == ["import-model", "migrate-max-v2-to-v3"]
    assert (target / "import-model" / "references" / "gates.md").is_file()
    (target / "import-model" / "mine.md").write_text("mine")
    with pytest.raises(MaxportError, match="installed already"):
        install(target)
    assert (target / "import-model" / "mine.md").exists()
    install(target, force=True)
    assert not (target / "import-model" / "mine.md").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(MaxportError, match="cannot be written"):
        install(tmp_path / "file" / "skills")


def test_list_and_marketplace() -> None:
    result = CliRunner().invoke(command, ["list", "--json"])
    rows = json.loads(result.stdout)
    jsonschema.validate(rows, schema())
    market = json.loads((ROOT / ".claude-plugin" / "marketplace.json").read_text())
    paths = market["plugins"][0]["skills"]
    assert sorted(Path(p).name for p in paths) == [row["name"] for row in rows]
    assert all((ROOT / path / "SKILL.md").is_file() for path in paths)
