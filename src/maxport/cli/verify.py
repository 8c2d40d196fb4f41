"""Judge a port against Hugging Face: logits, cache, ragged batches; no compile needed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click


@click.command(epilog="Example: maxport verify ./SmolLM2-135M-Instruct --port-dir ports/llama")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--port-dir", type=click.Path(path_type=Path), help="The port directory to judge.")
@click.option("--native", type=click.Choice(["v2", "v3"]), help="Judge MAX's own architecture.")
@click.option(
    "--engine",
    type=click.Choice(["evaluate", "compile"]),
    default="evaluate",
    show_default=True,
    help="Run the built graph on torch, or compile it with MAX.",
)
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--encoding",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="The port's working precision.",
)
@click.option(
    "--tier",
    type=click.Choice(["smoke", "coherence", "logits"]),
    default="logits",
    show_default=True,
    help="smoke: loads and runs; coherence: continues text; logits: all positions, all probes.",
)
@click.option("--steps", type=click.IntRange(min=1), default=48, show_default=True)
@click.option(
    "--positions",
    type=click.IntRange(min=16),
    help="Longest prompt of the ragged, chunked and decode probes.  [default: 150]",
)
@click.option("--max-positions", type=click.IntRange(min=16), default=1200, show_default=True)
@click.option("--twin", is_flag=True, help="Judge on a small random twin, not on the weights.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run the model's code.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write the report as a page.")
@click.option("--force", is_flag=True, help="Overwrite the page.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
@click.pass_context
def command(
    ctx: click.Context, /, model: str, html: Path | None, as_json: bool, **options: Any
) -> None:
    """Judge a port of MODEL, a folder, GGUF file or Hub id, against transformers in float32.

    Exit code 0: equal; 1: differs or does not load; 2: no verdict.
    """
    from rich.console import Console

    from maxport.cli._progress import progress
    from maxport.verify.files import check_page, write_page

    force = options.pop("force")
    if html is not None:
        check_page(html, force=force)
    with tempfile.TemporaryDirectory(prefix="maxport-verify-") as temp, progress() as say:
        report = _judge(model, Path(temp), say, **options)
    if html is not None:
        write_page(report, html)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        report.print_to(Console())
        if html is not None:
            click.echo(f"page: {html}")
    ctx.exit(report.exit_code)


def _judge(model: str, temp: Path, say: Any, **options: Any) -> Any:
    from maxport.checkpoint import open_checkpoint
    from maxport.verify import check_arguments, verify_port
    from maxport.verify.weights import judged_weights

    check_arguments(options["port_dir"], options["native"])
    remote, twin = options.pop("trust_remote_code"), options.pop("twin")
    revision = options.pop("revision")
    checkpoint = open_checkpoint(model, revision=revision, trust_remote_code=remote)
    say("choosing the weights")
    judged = judged_weights(
        checkpoint,
        temp,
        twin=twin,
        encoding=options["encoding"],
        kernels=options["engine"] == "compile",
        remote=remote,
    )
    return verify_port(
        judged.folder,
        weights=judged.kind,
        model=model,
        notes=[judged.note] if judged.note else [],
        trust_remote_code=remote,
        progress=say,
        **options,
    )
