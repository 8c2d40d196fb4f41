"""Start a port from one of MAX's own architectures, with a TODO for each measured difference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click


@click.command(name="scaffold")
@click.argument("model")
@click.option("--start-from", required=True, metavar="DONOR", help="Folder name, see list-archs.")
@click.option("--output-dir", "-o", default=".", type=click.Path(path_type=Path), show_default=True)
@click.option("--slug", help="Name of the port's folder. Default: config.json's model type.")
@click.option("--full-copy", is_flag=True, help="Copy the donor's files instead of subclassing.")
@click.option("--with-tests", is_flag=True, help="Add a pytest file that compares with HF.")
@click.option("--no-deltas", is_flag=True, help="Do not trace model and donor for differences.")
@click.option("--force", is_flag=True, help="Replace an existing port.")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--trust-remote-code", is_flag=True, help="Allow code in the checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Report JSON on stdout.")
def command(
    model: str,
    start_from: str,
    output_dir: Path,
    slug: str | None,
    full_copy: bool,
    with_tests: bool,
    no_deltas: bool,
    force: bool,
    revision: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Write a port of MODEL that starts as MAX's architecture DONOR.

    A scaffold is not a port: it computes what the donor computes until its TODOs are done.
    `maxport port` writes a finished port instead wherever it can.

    Example: maxport scaffold ./helium-1-2b --start-from llama3_modulev3 -o ports
    """
    from maxport.cli._progress import progress
    from maxport.scaffold import scaffold

    with progress() as say:
        made = scaffold(
            model,
            start_from,
            output_dir,
            slug=slug,
            full_copy=full_copy,
            with_tests=with_tests,
            measure=not no_deltas,
            force=force,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=say,
        )
    if as_json:
        deltas = [dataclasses.asdict(delta) for delta in made.deltas]
        report = {"port": str(made.folder), "name": made.name, "donor": made.donor}
        report |= {"deltas": deltas, "no_deltas": made.no_deltas}  # type: ignore[dict-item]
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(f"{made.folder}: registers {made.name}, computes what {made.donor} computes")
    for number, delta in enumerate(made.deltas, 1):
        click.echo(f"  TODO {number}  {delta.component}: {delta.change}")
    if made.no_deltas:
        click.echo(f"  differences: {made.no_deltas}")
    click.echo(f"next: do the TODOs in {made.folder / (made.folder.name + '.py')}, then")
    click.echo(f"  maxport gates {model} --port-dir {made.folder}")
