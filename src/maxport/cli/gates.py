"""Check a port directory without compiling: imports, registration, graph, weights, docstrings."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import click

from maxport.gates.base import GateResult


@click.command(name="gates")
@click.argument("model")
@click.option(
    "--port-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="The port: the folder given to --custom-architectures.",
)
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--trust-remote-code", is_flag=True, help="Allow code in the checkpoint.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option(
    "--encoding",
    type=click.Choice(["float32", "bfloat16"]),
    help="Default: float32 on CPU, bfloat16 on GPU.",
)
@click.option("--twin", is_flag=True, help="Build on a small random twin, not on the weights.")
@click.option("--time-limit", default=120.0, show_default=True, help="Seconds for the dry builds.")
@click.option("--json", "as_json", is_flag=True, help="Report JSON on stdout.")
def command(
    model: str,
    port_dir: Path,
    revision: str | None,
    trust_remote_code: bool,
    device: str,
    encoding: str | None,
    twin: bool,
    time_limit: float,
    as_json: bool,
) -> None:
    """Check the port in --port-dir against the checkpoint MODEL (a folder or Hub id).

    Exit code: 0 if every gate passes, 1 if one fails, 2 for bad input.

    Example: maxport gates ./SmolLM2-135M-Instruct --port-dir ports/llama
    """
    from maxport.gates import run_gates

    begun = time.monotonic()
    if sys.stderr.isatty():
        click.echo("importing the port and building its graph ...", err=True)
    results = run_gates(
        model,
        port_dir,
        revision=revision,
        trust_remote_code=trust_remote_code,
        device=device,
        encoding=encoding,
        twin=twin,
        limit_s=time_limit,
    )
    passed = all(result.passed for result in results)
    seconds = round(time.monotonic() - begun, 1)
    if as_json:
        gates = [{**dataclasses.asdict(result), "passed": result.passed} for result in results]
        report = {"model": model, "port": str(port_dir), "passed": passed, "seconds": seconds}
        click.echo(json.dumps({**report, "gates": gates}, indent=2))
    else:
        for result in results:
            click.echo(_lines(result))
        verdict = "all gates pass" if passed else "the port does not pass"
        click.echo(f"{verdict} ({seconds} s)")
    if not passed:
        sys.exit(1)


def _lines(result: GateResult) -> str:
    """One line for a gate; each further finding on its own line below."""
    mark = "pass" if result.passed else "FAIL"
    head = f"{mark}  {result.gate:<11}"
    if result.not_run:
        return f"FAIL  {result.gate:<11}could not look: {result.not_run}"
    told = []
    for finding in result.findings:
        note = "warning: " if finding.level == "warning" else ""
        where = f" ({finding.where})" if finding.where else ""
        fix = f". Fix: {finding.fix}" if finding.fix else ""
        told.append(f"{note}{finding.what}{where}{fix}")
    if not told:
        return head + result.summary
    pad = "\n" + " " * len(head)
    return head + pad.join(told)
