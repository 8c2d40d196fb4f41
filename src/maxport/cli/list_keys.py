"""List a checkpoint's tensors: names, dtypes, shapes, from headers only."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command(epilog="Example: maxport list-keys ./SmolLM2-135M-Instruct --summary")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--prefix", default="", help="Only tensors whose name starts with this.")
@click.option("--limit", type=click.IntRange(min=1), help="Show at most this many rows.")
@click.option("--summary", is_flag=True, help="One row per name pattern, layers counted.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def command(
    model: str, revision: str | None, prefix: str, limit: int | None, summary: bool, as_json: bool
) -> None:
    """List the tensors of MODEL, a folder, GGUF file or Hub id; downloads no weights."""
    from maxport.checkpoint import open_checkpoint
    from maxport.checkpoint.summary import by_dtype, patterns, size_text

    opened = open_checkpoint(model, revision=revision, inspect_only=True)
    tensors = [t for t in opened.tensors.values() if t.name.startswith(prefix)]
    groups = patterns(tensors) if summary else []
    rows = [asdict(row) for row in groups] if summary else [asdict(t) for t in tensors]
    shown = rows[:limit]
    if as_json:
        body = {
            "model": model,
            "revision": opened.revision,
            "prefix": prefix,
            "tensors": len(tensors),
            "bytes": sum(t.nbytes for t in tensors),
            "dtypes": by_dtype(tensors),
            "other_weights": list(opened.other_weights),
            "left_off": len(rows) - len(shown),
            "patterns" if summary else "keys": shown,
        }
        click.echo(json.dumps(body, indent=2))
        return
    for row in shown:
        if summary:
            shapes = " ".join(_shape(shape) for shape in row["shapes"][:3])
            layers = f" [{row['indices']}]" if row["indices"] else ""
            click.echo(
                f"{row['count']:>5} x {'/'.join(row['dtypes']):8} {shapes:20} "
                f"{row['pattern']}{layers}"
            )
        else:
            click.echo(f"{row['dtype']:8} {_shape(row['shape']):20} {row['name']}  ({row['file']})")
    if len(rows) > len(shown):
        click.echo(f"... {len(rows) - len(shown)} more")
    total = size_text(sum(t.nbytes for t in tensors))
    dtypes = ", ".join(f"{name} {row['tensors']}" for name, row in by_dtype(tensors).items())
    click.echo(f"{len(tensors)} tensors, {total}" + (f" ({dtypes})" if dtypes else ""))
    if not tensors and opened.other_weights:
        click.echo(f"weights in formats that are not read: {', '.join(opened.other_weights[:5])}")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "scalar"
