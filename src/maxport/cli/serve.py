"""Serve a port with MAX: the right flags, wait until healthy, ask it something."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path

import click


@click.command(name="serve", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.option(
    "--port-dir",
    type=click.Path(path_type=Path),
    help="The port; without it MAX's own architecture is served.",
)
@click.option("--port", default=8000, show_default=True, help="HTTP port.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds to wait for health.")
@click.option("--prompt", default="What is the capital of France?", show_default=True)
@click.option("--max-tokens", default=64, show_default=True, help="Length of the first answer.")
@click.option("--once", is_flag=True, help="Stop the server after the first answer.")
@click.option("--dry-run", is_flag=True, help="Print the command, start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Report JSON on stdout.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def command(
    model: str,
    port_dir: Path | None,
    port: int,
    timeout: float,
    prompt: str,
    max_tokens: int,
    once: bool,
    dry_run: bool,
    as_json: bool,
    extra: tuple[str, ...],
) -> None:
    """Run `max serve` for MODEL with the port in --port-dir; EXTRA options go to max serve.

    Exit code: 1 if the server does not get healthy, with the end of its log.

    Example: maxport serve ./SmolLM2-135M-Instruct --port-dir ports/llama --devices cpu
    """
    from maxport.checkpoint import open_checkpoint
    from maxport.cli._progress import progress
    from maxport.serving.client import Server
    from maxport.serving.launch import first_answer, has_chat_template, running, serve_command

    checkpoint = open_checkpoint(model)
    arguments = serve_command(model, port_dir, port, extra)
    if dry_run:
        told = json.dumps({"command": arguments}) if as_json else shlex.join(arguments)
        click.echo(told)
        return
    server = Server(f"http://localhost:{port}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends max serve too
    with progress() as say, running(arguments, server, timeout_s=timeout, say=say) as process:
        chat = has_chat_template(checkpoint.folder)
        answer = first_answer(server, prompt, max_tokens, chat=chat)
        name = server.model_name()
        if as_json:
            report = {"command": arguments, "url": server.url, "model": name, "chat": chat}
            click.echo(json.dumps({**report, "prompt": prompt, "answer": answer.text}, indent=2))
        else:
            click.echo(f"{name} at {server.url} ({'chat template' if chat else 'plain text'})")
            click.echo(f"> {prompt}\n{answer.text}")
        if not once:
            click.echo("serving; Ctrl-C stops", err=True)
            process.wait()
