"""README.md holds only commands, options, make targets and links that exist. Nothing is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from maxport.cli import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
SHELL_BLOCK = re.compile(r"^```(?:console|sh|shell|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A command quoted in running text; prose such as `maxport port` has no options and is checked too.
INLINE = re.compile(r"(?<!`)`((?:maxport|make) [^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")


def shell_lines(text: str) -> list[str]:
    """Lines of `text`'s shell blocks that a reader would type, continuation lines joined.

    In a block with `$ ` prompts the other lines are output; in one without, every line is typed.
    """
    found: list[str] = []
    for block in SHELL_BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        found += prompted or [line for line in lines if line.strip()]
    return found


def typed(program: str) -> list[str]:
    """Every command line of `program` in README.md, from shell blocks and from running text."""
    lines = shell_lines(README) + INLINE.findall(README)
    return sorted({line.strip() for line in lines if line.split()[:1] == [program]})


def problem(line: str) -> str:
    """What is wrong with one `maxport ...` line; an empty string if nothing is.

    Options are looked up in click's own parameters; a value after an option that takes one is
    checked against its choices. What follows `--` goes to another program.
    """
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = cli
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        child = command.get_command(click.Context(command), words[0])
        if child is None:
            return f"no subcommand {words[0]!r}"
        command, words = child, words[1:]
    # EXTRA options of `serve` go to max serve; click is told so by this setting.
    passes_on = command.ignore_unknown_options or command.context_settings.get(
        "ignore_unknown_options", False
    )
    known = {
        name: option
        for option in command.get_params(click.Context(command, **command.context_settings))
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    }
    arguments = 0
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if not word.startswith("-"):
            arguments += 1
            continue
        name, _, value = word.partition("=")
        if name not in known:
            if passes_on:
                continue
            return f"no option {name}"
        option = known[name]
        if option.is_flag:
            continue
        if not value and not words:
            return f"{name} needs a value"
        value = value or words.pop(0)
        if isinstance(option.type, click.Choice) and value not in option.type.choices:
            return f"{name} cannot be {value!r}"
    takes = [p for p in command.params if isinstance(p, click.Argument)]
    most = sum(p.nargs for p in takes)
    if arguments > most and not any(p.nargs == -1 for p in takes):
        return f"{arguments} arguments, at most {most}"
    return ""


@pytest.mark.parametrize("line", typed("maxport"))
def test_command_and_options_exist(line: str) -> None:
    assert problem(line) == ""


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("maxport prot ./m", "subcommand"),
        ("maxport port ./m --fast", "option --fast"),
        ("maxport verify ./m --engine guess", "cannot be"),
        ("maxport port ./m -o", "needs a value"),
        ("maxport port ./m ./n", "arguments"),
        ("maxport skills remove", "subcommand"),
    ],
)
def test_wrong_lines_are_found(line: str, wrong: str) -> None:
    assert wrong in problem(line)


def test_every_command_is_shown() -> None:
    shown = {line.split()[1] for line in shell_lines(README) if line.startswith("maxport ")}
    assert set(cli.list_commands(click.Context(cli))) <= shown


@pytest.mark.parametrize("line", typed("make"))
def test_make_targets_exist(line: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert line.split()[1] in targets


@pytest.mark.parametrize(
    "target", sorted({t for t in LINK.findall(README) if not t.startswith(("http:", "https:"))})
)
def test_linked_files_exist(target: str) -> None:
    assert (ROOT / target).exists()
