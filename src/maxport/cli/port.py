"""Port a Hugging Face model to MAX: readable ModuleV3 source, weights mapped, idioms proven."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from maxport.checkpoint import Checkpoint
    from maxport.plan.planning import Plan


@click.command(epilog="Example: maxport port ./SmolLM2-135M-Instruct -o ports --yes")
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
@click.option("--with-tests", is_flag=True, help="Add a pytest file that compares with HF.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask after showing the plan.")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run the model's code.")
@click.option("--force", is_flag=True, help="Replace an existing port.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON; asks nothing.")
def command(
    model: str,
    output_dir: Path,
    slug: str | None,
    with_tests: bool,
    yes: bool,
    revision: str | None,
    trust_remote_code: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Port MODEL, a folder, GGUF file or Hub id.

    Shows the plan and, on a terminal, asks whether to go on. Traces the model at two small sizes,
    recognises and proves what each layer does, and writes the port to OUTPUT_DIR/SLUG. Needs no
    weights and no GPU. Exit code 0: written; 2: cannot be ported; 130: not wanted.
    """
    from maxport.cli._progress import progress

    with progress() as say:
        job = _read(model, revision, trust_remote_code, output_dir, slug, force, say)
    if not as_json:
        click.echo(job.plan.paragraph if job.plan else f"no plan: {job.no_plan}")
        if not yes and on_terminal():
            click.confirm("Write the port?", default=True, abort=True)
    with progress() as say:
        body = _write(job, model, output_dir, force, with_tests, say)
    if as_json:
        click.echo(json.dumps(body, indent=2))
    else:
        _print(body, model)


@dataclass(frozen=True)
class Job:
    """What is to be ported, under which name, and the plan of it or why there is none."""

    checkpoint: Checkpoint
    revision: str | None
    trust_remote_code: bool
    slug: str
    plan: Plan | None
    no_plan: str


def on_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _read(
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    output_dir: Path,
    slug: str | None,
    force: bool,
    say: Callable[[str], None],
) -> Job:
    """Everything that can be refused or asked before the long part begins."""
    from maxport.checkpoint import open_checkpoint
    from maxport.emit.write import target_folder
    from maxport.errors import MaxportError
    from maxport.plan.max_source import require_max
    from maxport.plan.memory import find_devices

    require_max()
    say("reading the checkpoint")
    checkpoint = open_checkpoint(model, revision=revision, trust_remote_code=trust_remote_code)
    name = default_slug(checkpoint.config) if slug is None else slug
    target_folder(output_dir, name, force=force)
    say("importing torch and transformers")
    from maxport.plan.planning import make_plan

    plan, why = None, ""
    try:
        devices = find_devices("auto", None, None)
        plan = make_plan(checkpoint, devices, trust_remote_code=trust_remote_code, progress=say)
    except MaxportError as error:
        why = error.what  # a port needs no donor; what stops a port too is said by porting
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Job(checkpoint, revision, trust_remote_code, name, plan, why)


def _write(
    job: Job,
    model: str,
    output_dir: Path,
    force: bool,
    with_tests: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Trace, emit and write; the report."""
    from maxport.emit.testfile import render_test_file
    from maxport.emit.write import write_port
    from maxport.plan.planning import portdoc_evidence
    from maxport.trace.evidence import idiom_rows, with_documents
    from maxport.trace.load import load_config
    from maxport.trace.port import make_port

    port = make_port(
        load_config(job.checkpoint, trust_remote_code=job.trust_remote_code),
        slug=job.slug,
        class_name=registered_name(job.checkpoint.config),
        stored=list(job.checkpoint.tensors),
        repos=[] if Path(model).exists() else [model],
        progress=say,
    )
    say("formatting the port")
    more = portdoc_evidence(job.plan) if job.plan else {}
    files = with_documents(port, model, job.revision, more)
    if with_tests:
        files |= render_test_file(job.slug, port.spec.display_name, model)
    path = write_port(output_dir, job.slug, files, force=force)
    return {
        "class_name": port.spec.class_name,
        "slug": job.slug,
        "path": str(path),
        "files": sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()),
        "plan": job.plan.paragraph if job.plan else "",
        "idioms": idiom_rows(port),
        "covered": port.study.covered,
        "traced": port.study.total,
        "plain": port.study.plain,
    }


def _print(body: dict[str, Any], model: str) -> None:
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
