"""Show a model's config key by key: value, what MAX reads it as, who else reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from maxport.plan.config_reads import Read
    from maxport.plan.inspection import Inspection, KeyRow


@click.command(epilog="Example: maxport inspect ./SmolLM2-135M-Instruct --start-from olmo3")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--start-from", metavar="SLUG", help="Report what this MAX architecture reads.")
@click.option(
    "--port-dir", type=click.Path(path_type=Path), help="Report what this port reads as well."
)
@click.option(
    "--measure",
    is_flag=True,
    help="Also build the Hugging Face model without weights and record which keys its code reads "
    "(imports torch).",
)
@click.option("--trust-remote-code", is_flag=True, help="With --measure: run the model's own code.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def command(
    model: str,
    revision: str | None,
    start_from: str | None,
    port_dir: Path | None,
    measure: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Inspect MODEL, a folder, GGUF file or Hub id: config, weights, native support in MAX."""
    from maxport.checkpoint import open_checkpoint
    from maxport.plan.inspection import inspect_checkpoint

    opened = open_checkpoint(
        model, revision=revision, inspect_only=True, trust_remote_code=trust_remote_code
    )
    result = inspect_checkpoint(opened, start_from=start_from, port_dir=port_dir)
    forward = None
    if measure:
        from maxport.trace.config_access import measure_reads, with_measured

        access = measure_reads(opened, trust_remote_code=trust_remote_code)
        result, forward = with_measured(result, access), access.forward
    if as_json:
        click.echo(json.dumps({**result.to_json(), "forward": forward}, indent=2))
        return
    _print(result, forward)


def _print(result: Inspection, forward: str | None) -> None:
    body = result.to_json()
    click.echo(f"{body['model']}: {body['architecture']} ({body['model_type']})")
    _print_facts(body)
    _print_native(body)
    name = result.reader.slug if result.reader else None
    click.echo(f"\nconfig.json{f', read by {name}' if name else ''}:")
    wide = min(40, max((len(row.key) for row in result.rows), default=0))
    for row in result.rows:
        click.echo(f"  {row.key:{wide}} = {_value(row.value):28}  {_who(row)}".rstrip())
    if forward is not None:
        click.echo(f"\nHugging Face code measured: construction and {forward}")


def _print_facts(body: dict[str, Any]) -> None:
    from maxport.checkpoint.summary import size_text

    weights = body["weights"]
    dtypes = ", ".join(f"{n} {size_text(row['bytes'])}" for n, row in weights["dtypes"].items())
    if weights["tensors"]:
        parameters = sum(row["parameters"] for row in weights["dtypes"].values())
        click.echo(
            f"  weights    {weights['tensors']} tensors, {parameters:,} parameters, {dtypes}, "
            f"{weights['files']} file(s)"
        )
    else:
        click.echo(f"  weights    none readable {' '.join(weights['other'][:3])}".rstrip())
    click.echo(f"  tokenizer  {', '.join(body['tokenizer_files']) or 'no files'}")
    if body["needs_remote_code"]:
        click.echo("  code       brings its own Python code: needs --trust-remote-code")
    elif not body["known_to_transformers"]:
        click.echo("  code       this model type is unknown to the installed transformers")


def _print_native(body: dict[str, Any]) -> None:
    if not body["native"]:
        click.echo("  MAX        does not have this architecture: port it with `maxport port`")
    for arch in body["native"]:
        encodings = ", ".join(arch["encodings"])
        click.echo(f"  MAX        has {arch['name']} ({arch['slug']}, {arch['lane']}; {encodings})")
        click.echo(f"             {arch['serve']}")


def _value(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _who(row: KeyRow) -> str:
    parts = []
    if row.reader is not None:
        parts.append(_as(row.reader) if row.reader else "not read")
    if row.pipeline and row.pipeline != row.reader:
        parts.append(f"pipeline: {_as(row.pipeline)}")
    if row.port is not None:
        parts.append(f"port: {_as(row.port) if row.port else 'not read'}")
    if row.hf is not None:
        parts.append(f"HF: {row.hf[0] if row.hf else 'not read'}")
    return "; ".join(parts)


def _as(reads: tuple[Read, ...]) -> str:
    named = [read for read in reads if read.into] or list(reads)
    own = [read for read in named if read.into == read.key.rsplit(".", 1)[-1]] or named
    return f"{own[0].into or 'tested'} ({own[0].place})"
