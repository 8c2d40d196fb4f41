"""Plan a port: nearest donor by measurement, what differs, lane, distribution, validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from maxport.plan.planning import Plan


@click.command(epilog="Example: maxport plan ./SmolLM2-135M-Instruct --output PLAN.md")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--start-from", metavar="SLUG", help="Compare with this MAX architecture.")
@click.option("--lane", type=click.Choice(["v2", "v3"]), help="Rank donors of this lane only.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    show_default=True,
    help="What the model is to run on.",
)
@click.option("--devices", type=click.IntRange(min=1), help="How many; default: what is found.")
@click.option("--memory-gib", type=float, help="Memory of one device; default: what is found.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run the model's code.")
@click.option("--output", type=click.Path(path_type=Path), help="Also write the plan as Markdown.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def command(
    model: str,
    revision: str | None,
    start_from: str | None,
    lane: str | None,
    device: str,
    devices: int | None,
    memory_gib: float | None,
    trust_remote_code: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Plan a port of MODEL, a folder, GGUF file or Hub id. No weight is read.

    A small twin of the model is traced and compared with the Hugging Face class of every donor in
    MAX, traced the same way. A donor's score is the size of the edit script between the two
    (distance), in linear layers to write, plus what its reference source shares too little.
    """
    from rich.console import Console

    from maxport.checkpoint import open_checkpoint
    from maxport.cli._progress import progress
    from maxport.errors import MaxportError
    from maxport.plan.memory import find_devices
    from maxport.plan.planning import make_plan, write_plan

    if output is not None and output.exists() and not force:
        raise MaxportError("the output file exists", where=str(output), fix="pass --force")
    opened = open_checkpoint(model, revision=revision, trust_remote_code=trust_remote_code)
    with progress() as say:
        plan = make_plan(
            opened,
            find_devices(device, devices, memory_gib),
            start_from=start_from,
            lane=lane,
            trust_remote_code=trust_remote_code,
            progress=say,
        )
    if output is not None:
        write_plan(plan, output, force=force)
    if as_json:
        click.echo(json.dumps(plan.to_json(), indent=2))
    else:
        _print(plan, Console())


def _print(plan: Plan, console: Console) -> None:
    from rich.table import Table

    console.print(plan.paragraph, soft_wrap=True, highlight=False)
    columns = ("score", "distance", "shared", "source", "deltas")
    donors = Table("donor", "lane", *columns, title="Nearest donors")
    for ranked in plan.ranking[:5]:
        found, arch = ranked.comparison, ranked.donor.arch
        source = "unknown" if ranked.likeness is None else f"{ranked.likeness:.0%}"
        near = (f"{ranked.score:g}", f"{found.distance:g}", f"{found.shared:.0%}", source)
        row = (*near, str(len(found.deltas)))
        donors.add_row(arch.slug, arch.lane, *row)
    console.print(donors)
    deltas = Table("component", "Hugging Face", "donor", "change", title="Deltas")
    for delta in plan.chosen.comparison.deltas:
        where = delta.component + (f" ({', '.join(delta.kinds)})" if delta.kinds else "")
        deltas.add_row(where, delta.reference, delta.donor, delta.change)
    if plan.chosen.comparison.deltas:
        console.print(deltas)
    unread = [row["key"] for row in plan.config if not row["donor"] and not row["pipeline"]]
    if unread:
        console.print(f"config.json keys no donor code reads: {', '.join(unread)}", highlight=False)
