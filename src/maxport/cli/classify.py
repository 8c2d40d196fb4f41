"""Say which generation of MAX's model API code uses: V2, V3, mixed or neither."""

from __future__ import annotations

import json

import click


@click.command(epilog="Example: maxport classify llama3   (or a folder, or one .py file)")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
@click.option("--all", "show_all", is_flag=True, help="Also list what is of neither lane.")
def command(path: str, as_json: bool, show_all: bool) -> None:
    """Classify PATH per file and per class, following base classes into installed architectures.

    PATH is an installed architecture's name, a folder, or one Python file. Reads source text only.
    """
    from maxport.migrate.classify import classify
    from maxport.migrate.target import open_target

    result = classify(open_target(path))
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
        return
    click.echo(f"{result.name}: {result.lane.upper()} - {result.why}")
    if result.follows:
        click.echo(f"  builds on: {', '.join(result.follows)}")
    for file in result.files:
        if file.lane == "neither" and not show_all:
            continue
        click.echo(f"  {file.lane:8} {file.path}")
        for item in file.classes:
            if item.lane != "neither" or show_all:
                click.echo(f"    {item.lane:8} line {item.line:<5} {item.name}: {item.why}")
        if not file.classes:
            for line, text in file.evidence[:3]:
                click.echo(f"    line {line:<5} {text}")
