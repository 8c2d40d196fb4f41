"""Check this machine: versions, devices, caches, what is missing and how to get it."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command(epilog="Example: maxport doctor --json")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool) -> None:
    """Say what maxport finds here and what keeps a command from working.

    Exit code 0: every command can work; 1: something is missing.
    """
    from maxport.engine.doctor import examine

    found = examine()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    ctx.exit(1 if found["problems"] else 0)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(show_header=True)
    for column in ("package", "installed", "wanted", ""):
        table.add_column(column)
    for row in found["versions"]:
        mark = "[green]ok[/green]" if row["ok"] else "[red]missing[/red]"
        if row["installed"] and not row["ok"]:
            mark = "[red]wrong version[/red]"
        table.add_row(row["package"], row["installed"] or "-", row["wanted"] or "any", mark)
    console.print(table)
    console.print("devices: " + (", ".join(found["devices"]) or "none seen"), highlight=False)
    memory = found["memory_free_bytes"] / 2**30
    console.print(f"memory free: {memory:.1f} GiB", highlight=False)
    for cache in found["caches"]:
        size = f"{cache['bytes'] / 2**20:.1f} MiB" if cache["exists"] else "empty"
        console.print(f"cache {cache['name']}: {cache['path']} ({size})", highlight=False)
    for problem in found["problems"]:
        console.print(f"[red]problem[/red]: {problem['what']}", highlight=False)
        if problem["fix"]:
            console.print(f"  fix: {problem['fix']}", highlight=False, markup=False)
    if not found["problems"]:
        console.print("[green]everything that maxport needs is here[/green]")
