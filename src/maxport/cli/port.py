"""Port a Hugging Face model to MAX: readable ModuleV3 source, weights mapped, idioms proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command(epilog="Example: maxport port ./SmolLM2-135M-Instruct -o ports")
@click.argument("model")
@click.option(
    "-o",
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("ports"),
    show_default=True,
    help="Folder that the port's folder is written to.",
)
@click.option(
    "--slug", help="Name of the port's folder and package; from the model type if left out."
)
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run the model's code.")
@click.option("--force", is_flag=True, help="Replace an existing port.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def command(model: str, as_json: bool, output_dir: Path, force: bool, **options: Any) -> None:
    """Port MODEL, a folder, GGUF file or Hub id.

    Traces the model at two small sizes, recognises and proves what each layer does, and writes the
    port to OUTPUT_DIR/SLUG. Needs no weights and no GPU. Exit code 0: written; 2: cannot be ported.
    """
    from maxport.cli._progress import progress

    with progress() as say:
        body = _port(model, output_dir, force, say, **options)
    if as_json:
        click.echo(json.dumps(body, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{body['class_name']}[/bold] from {model}")
    table = Table("idiom", "where", "proof", box=None, pad_edge=False)
    for row in body["idioms"]:
        table.add_row(row["idiom"], row["where"], row["proof"])
    console.print(table)
    share = 100 * body["covered"] / body["traced"]
    console.print(
        f"{body['covered']} of {body['traced']} traced operations ({share:.1f} %) in proven idioms"
        + (f", plainly: {body['plain']}" if body["plain"] else "")
    )
    console.print(f"written: {body['path']}", soft_wrap=True)
    console.print(f"next: maxport verify {model} --port-dir {body['path']}", soft_wrap=True)


def _port(
    model: str,
    output_dir: Path,
    force: bool,
    say: Any,
    *,
    slug: str | None,
    revision: str | None,
    trust_remote_code: bool,
) -> dict[str, Any]:
    from maxport.checkpoint import open_checkpoint
    from maxport.emit.write import target_folder, write_port
    from maxport.plan.max_source import require_max

    require_max()
    say("reading the checkpoint")
    checkpoint = open_checkpoint(model, revision=revision, trust_remote_code=trust_remote_code)
    name = slug or default_slug(checkpoint.config)
    target_folder(output_dir, name, force=force)
    say("importing torch and transformers")
    from maxport.trace.evidence import idiom_rows, with_documents
    from maxport.trace.load import load_config
    from maxport.trace.port import make_port

    config = load_config(checkpoint, trust_remote_code=trust_remote_code)
    port = make_port(
        config,
        slug=name,
        class_name=registered_name(checkpoint.config),
        stored=list(checkpoint.tensors),
        repos=[] if Path(model).exists() else [model],
        progress=say,
    )
    say("formatting the port")
    path = write_port(output_dir, name, with_documents(port, model, revision), force=force)
    return {
        "class_name": port.spec.class_name,
        "slug": name,
        "path": str(path),
        "files": sorted(f.name for f in path.iterdir() if f.is_file()),
        "idioms": idiom_rows(port),
        "covered": port.study.covered,
        "traced": port.study.total,
        "plain": port.study.plain,
    }


def default_slug(config: dict[str, Any]) -> str:
    """A package name from the model type that no Python keyword or MAX slug has."""
    stem = "".join(c if c.isalnum() else "_" for c in str(config.get("model_type", "model"))).strip(
        "_"
    )
    return f"{stem.lower() or 'model'}_port"


def registered_name(config: dict[str, Any]) -> str:
    """The class name the port registers: `_ModuleV3` is added where MAX has the class itself."""
    from maxport.plan.native import native_archs

    name: str = config["architectures"][0]
    taken = {arch.name for arch in native_archs()}
    return f"{name}_ModuleV3" if name in taken else name
