"""Install the Agent Skills that teach a coding agent to drive maxport."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.group(name="skills")
def command() -> None:
    """Agent Skills (SKILL.md with references) for coding agents.

    Example: maxport skills install --dir .agents/skills
    """


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Report JSON on stdout.")
def list_skills(as_json: bool) -> None:
    """Name and purpose of each skill.

    Example: maxport skills list
    """
    from maxport.skills import skills

    rows = [{"name": skill.name, "description": skill.description} for skill in skills()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['name']}: {row['description']}")


@command.command(name="install")
@click.option(
    "--dir",
    "target",
    default=Path(".agents/skills"),
    type=click.Path(path_type=Path),
    show_default=True,
    help="Folder in which the agent looks for skills.",
)
@click.option("--force", is_flag=True, help="Replace skills of the same name.")
@click.option("--json", "as_json", is_flag=True, help="Report JSON on stdout.")
def install_skills(target: Path, force: bool, as_json: bool) -> None:
    """Copy the skills into a folder, their references made from the installed commands.

    Example: maxport skills install --dir .agents/skills
    """
    from maxport.skills import install

    written = [str(path) for path in install(target, force=force)]
    click.echo(json.dumps({"installed": written}, indent=2) if as_json else "\n".join(written))
