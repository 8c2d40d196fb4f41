"""The skills' reference pages, made from the commands and gates themselves.

Run as a program, it writes them into the source tree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import click

#: Commands each skill drives.
COMMANDS = {
    "import-model": (
        "doctor",
        "inspect",
        "list-archs",
        "list-keys",
        "check-walls",
        "plan",
        "port",
        "scaffold",
        "gates",
        "verify",
        "serve",
        "compare",
    ),
    "migrate-max-v2-to-v3": ("classify", "migrate", "gates", "verify"),
}


def render_references() -> dict[str, dict[str, str]]:
    """For each skill its reference pages by file name."""
    pages = {name: {"commands.md": render_commands(given)} for name, given in COMMANDS.items()}
    pages["import-model"]["gates.md"] = render_gates()
    return pages


def render_commands(names: Iterable[str]) -> str:
    """Usage, options and example of each command."""
    from maxport.cli import cli

    parts = ["# Commands", "Made from the commands' own help."]
    context = click.Context(cli, info_name="maxport")
    for name in names:
        command = cli.get_command(context, name)
        if command is None:
            raise LookupError(f"maxport has no command {name}")
        inner = click.Context(command, info_name=f"maxport {name}")
        parts.append(f"## {name}\n\n```text\n{_help(command, inner)}\n```")
    return "\n\n".join(parts) + "\n"


def _help(command: click.Command, context: click.Context) -> str:
    formatter = click.HelpFormatter(width=96)
    command.format_help(context, formatter)
    return formatter.getvalue().replace("maxport maxport", "maxport").strip()


def render_gates() -> str:
    """What each gate looks at, and the lint gate's rules."""
    from maxport.gates import GATES
    from maxport.gates.lint import RULES

    rows = [
        "# Gates",
        "In the order of the report; the first failure often explains the others.",
        "",
    ]
    for name, check in GATES:
        module = sys.modules[check.__module__]
        rows.append(f"- **{name}**: {_first_line(module.__doc__)}")
    rows += ["", "## Rules of the lint gate", ""]
    rows += [f"- {_first_line(rule.__doc__)}" for rule in RULES]
    return "\n".join(rows) + "\n"


def _first_line(doc: str | None) -> str:
    return (doc or "").strip().split("\n", 1)[0]


def write_references(folder: Path) -> None:
    """Write all pages below a folder of skills."""
    for skill, pages in render_references().items():
        target = folder / skill / "references"
        target.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (target / name).write_text(text, "utf-8")


if __name__ == "__main__":
    write_references(Path(__file__).parent / "library")
