"""Compare a running server with Hugging Face and name the part at fault."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from maxport.serving.compare import Check


@click.command(name="compare")
@click.argument("model")
@click.option("--port", default=8000, show_default=True, help="HTTP port of the server.")
@click.option("--host", default="localhost", show_default=True)
@click.option(
    "--port-dir",
    type=click.Path(path_type=Path),
    help="The port: its graph is run directly to tell a graph fault from a pipeline fault.",
)
@click.option(
    "--pipeline",
    is_flag=True,
    help="With --port-dir: also run MAX's pipeline in this process (compiles), to tell a pipeline "
    "fault from a server fault.",
)
@click.option("--slug", default="", help="Name of the port, for the report.")
@click.option("--prompt", "prompts", multiple=True, help="Instead of the built-in prompts.")
@click.option("--max-tokens", default=256, show_default=True, help="Longest continuation.")
@click.option(
    "--encoding",
    type=click.Choice(["float32", "bfloat16"]),
    help="Dtype the server runs in. Default: config.json's.",
)
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--trust-remote-code", is_flag=True, help="Allow code in the checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Report JSON on stdout.")
def command(
    model: str,
    port: int,
    host: str,
    port_dir: Path | None,
    pipeline: bool,
    slug: str,
    prompts: tuple[str, ...],
    max_tokens: int,
    encoding: str | None,
    revision: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Check the server on --port against transformers' float32 model of MODEL.

    Exit code: 0 if all checks agree, 1 if one differs, 2 if nothing can be compared.

    Example: maxport compare ./SmolLM2-135M-Instruct --port 8000 --port-dir ports/llama
    """
    from maxport.checkpoint import open_checkpoint
    from maxport.cli._progress import progress
    from maxport.serving.client import Server
    from maxport.serving.compare import LENGTHS, TEXTS, Comparison

    server = Server(f"http://{host}:{port}")
    name = server.model_name()
    checkpoint = open_checkpoint(model, revision=revision, trust_remote_code=trust_remote_code)
    dtype = encoding or str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"))
    folder = checkpoint.weights_folder()
    with progress() as say:
        say("loading the reference")
        reference, tokenizer = _reference(folder, trust_remote_code)
        comparison = Comparison(
            server=server,
            reference=reference,
            tokenizer=tokenizer,
            tolerance=_tolerance(reference, dtype),
            direct=_direct(port_dir, folder) if port_dir is not None else None,
            pipeline=_pipeline(port_dir, folder, dtype) if port_dir and pipeline else None,
            texts=prompts or TEXTS,
            lengths=[n for n in LENGTHS if n <= max_tokens] or [max_tokens],
            say=say,
        )
        checks = comparison.run()
    faults = sorted({check.fault for check in checks if check.fault})
    verdict = "differs" if any(c.verdict == "differs" for c in checks) else "equal"
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        report: dict[str, Any] = {"model": model, "server": server.url, "serves": name}
        report |= {"port": slug or (port_dir.name if port_dir else "")}
        click.echo(
            json.dumps({**report, "verdict": verdict, "faults": faults, "checks": rows}, indent=2)
        )
    else:
        for check in checks:
            click.echo(_line(check))
        click.echo(f"{verdict}; at fault: {', '.join(faults)}" if faults else verdict)
    if verdict == "differs":
        sys.exit(1)


def _line(check: Check) -> str:
    numbers = ""
    if check.max_diff is not None and check.tolerance is not None:
        numbers = f" (max diff {check.max_diff:.2g}, allowed {check.tolerance:.2g})"
    fault = f" -> {check.fault}" if check.fault else ""
    return f"{check.verdict:<8} {check.name:<18} {check.detail}{numbers}{fault}"


def _reference(folder: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """The float32 reference and the checkpoint's tokenizer."""
    from transformers import AutoTokenizer

    from maxport.errors import MaxportError
    from maxport.verify.reference import load_reference

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise MaxportError(
            f"the checkpoint has no tokenizer: {str(error).splitlines()[0]}",
            where=str(folder),
            fix="add tokenizer.json and tokenizer_config.json",
        ) from error
    return load_reference(folder, trust_remote_code=trust_remote_code), tokenizer


def _tolerance(reference: Any, dtype: str) -> Callable[[Sequence[int], Any], float]:
    """Allowed difference of two logits after some tokens, from disturbing the reference."""
    from maxport.verify.tolerance import derive

    def allowed(ids: Sequence[int], logits: Any) -> float:
        return float(derive(reference, {0: tuple(ids)}, {0: logits}, dtype).value)

    return allowed


def _direct(port_dir: Path, folder: Path) -> Callable[[Sequence[int]], Any]:
    """Logits of the port's graph, evaluated in float32 without a server."""
    built: list[Any] = []

    def logits(ids: Sequence[int]) -> Any:
        from maxport.engine.build import build_port
        from maxport.engine.runner import EvaluatedRunner

        if not built:
            built.append(EvaluatedRunner(build_port(port_dir, folder)))
        built[0].reset()
        return built[0].step({0: list(ids)})[0]

    return logits


def _pipeline(port_dir: Path, folder: Path, dtype: str) -> Callable[[Sequence[int]], Any]:
    """Next-token logits of MAX's pipeline with the port, compiled on the first call."""
    made: list[Any] = []

    def logits(ids: Sequence[int]) -> Any:
        from maxport.engine.pipeline_run import PipelineRun

        if not made:
            made.append(PipelineRun(port_dir, folder, encoding=dtype))
        return made[0].logits(ids)

    return logits
