"""Scan a model for what would stop a port: exit 0 go on, 1 review, 2 stop."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command(epilog="Example: maxport check-walls ./SmolLM2-135M-Instruct --device cpu")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    show_default=True,
    help="What the port shall run on; auto takes GPUs if there are any.",
)
@click.option("--devices", type=click.IntRange(min=1), help="Number of devices.")
@click.option(
    "--device-memory", type=click.FloatRange(min=0, min_open=True), help="GiB of each device."
)
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def command(
    model: str,
    revision: str | None,
    device: str,
    devices: int | None,
    device_memory: float | None,
    as_json: bool,
) -> int:
    """Check MODEL, a folder, GGUF file or Hub id, from its config and headers only."""
    from maxport.checkpoint import open_checkpoint
    from maxport.plan.memory import estimate, find_devices
    from maxport.plan.walls import check_walls, exit_code

    opened = open_checkpoint(model, revision=revision, inspect_only=True)
    target = find_devices(device, devices, device_memory)
    walls = check_walls(opened, target)
    code = exit_code(walls)
    verdict = ("go on", "review", "stop")[code]
    if as_json:
        body = {
            "model": model,
            "revision": opened.revision,
            "architecture": opened.architecture,
            "device": asdict(target),
            "estimate": asdict(estimate(opened, target.kind)),
            "verdict": verdict,
            "walls": [asdict(wall) for wall in walls],
        }
        click.echo(json.dumps(body, indent=2))
        return code
    for wall in walls:
        click.echo(f"{wall.level.upper():6} {wall.kind}: needs {wall.need}")
        click.echo(f"       but {wall.lack}")
        click.echo(f"       fix: {wall.fix}")
    click.echo(f"{verdict}: {len(walls)} wall(s) for {opened.architecture} on {target.kind}")
    return code
