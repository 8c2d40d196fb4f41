"""Show what a model computes: the traced graph of each module as Python a person can read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click


@click.command(epilog="Example: maxport trace ./SmolLM2-135M-Instruct --module model.layers.0")
@click.argument("model")
@click.option("--module", help="Only this module and those inside it, by its path in transformers.")
@click.option(
    "--stage",
    type=click.Choice(["traced", "recognised", "ragged"]),
    default="recognised",
    show_default=True,
    help="traced: torch's operations; recognised: proven idioms folded; ragged: as emitted.",
)
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run the model's code.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def command(model: str, module: str | None, stage: str, as_json: bool, **options: Any) -> None:
    """Trace MODEL's tiny twin and print it module by module, one layer of each kind.

    Sizes in the graph are the twin's; `ragged` shows them as expressions over the configuration.
    """
    from maxport.cli._progress import progress

    with progress() as say:
        graph, findings = _graph(model, stage, say, **options)
    chosen = [n for n in graph.nodes if _inside(n.scope, module)]
    if not chosen:
        from maxport.errors import MaxportError

        scopes = ", ".join(sorted({n.scope for n in graph.nodes if n.scope})[:8])
        raise MaxportError(f"the model has no module {module!r}", fix=f"one of: {scopes}, ...")
    if as_json:
        click.echo(json.dumps({"modules": list(_as_json(chosen)), "findings": findings}, indent=2))
        return
    from maxport.ir import render

    scope = None
    for node in chosen:
        if node.scope != scope:
            scope = node.scope
            click.echo(f"\n# {scope or 'the model itself'}")
        click.echo(render(node) + (f"  [{node.proof}]" if node.proof else ""))


def _inside(scope: str, module: str | None) -> bool:
    return module is None or scope == module or scope.startswith(f"{module}.")


def _graph(
    model: str, stage: str, say: Any, *, revision: str | None, trust_remote_code: bool
) -> tuple[Any, list[dict[str, Any]]]:
    from dataclasses import asdict

    from maxport.checkpoint import open_checkpoint
    from maxport.trace.load import load_config
    from maxport.trace.study import stage_of

    say("reading the checkpoint")
    checkpoint = open_checkpoint(model, revision=revision, trust_remote_code=trust_remote_code)
    config = load_config(checkpoint, trust_remote_code=trust_remote_code)
    graph, findings = stage_of(config, stage, say)
    return graph, [{k: str(v) for k, v in asdict(f).items()} for f in findings]


def _as_json(nodes: list[Any]) -> Iterator[dict[str, Any]]:
    from maxport.ir import render

    scope: str | None = None
    lines: list[str] = []
    for node in nodes:
        if node.scope != scope and lines:
            yield {"module": scope, "lines": lines}
            lines = []
        scope = node.scope
        lines.append(render(node))
    yield {"module": scope, "lines": lines}
