"""List the architectures the installed MAX registers, and find a model's own or a donor."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command(epilog="Example: maxport list-archs --match LlamaForCausalLM")
@click.option("--match", help="Only names or slugs that contain this (case-insensitive).")
@click.option("--donors", is_flag=True, help="Only text-generation decoders a port can start from.")
@click.option("--lane", type=click.Choice(["v2", "v3"]), help="Only this model API.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def command(match: str | None, donors: bool, lane: str | None, as_json: bool) -> None:
    """List architectures as MAX's own sources declare them; MAX is not imported.

    Exits 1 if --match finds nothing, so that scripts can ask "does MAX have this class?".
    """
    from maxport.errors import MaxportError
    from maxport.plan.max_source import max_version
    from maxport.plan.native import native_archs

    found = [arch for arch in native_archs() if lane in (None, arch.lane)]
    if donors:
        found = [arch for arch in found if arch.donor]
    if match:
        wanted = match.lower()
        found = [a for a in found if wanted in a.name.lower() or wanted in a.slug.lower()]
    if as_json:
        body = {"max": max_version(), "architectures": [asdict(arch) for arch in found]}
        click.echo(json.dumps(body, indent=2))
    else:
        for arch in found:
            encodings = ",".join(arch.encodings)
            click.echo(f"{arch.lane}  {arch.slug:28} {arch.name:46} {arch.task:22} {encodings}")
    if match and not found:
        raise MaxportError(
            f"MAX {max_version()} registers no architecture that matches {match!r}",
            fix="`maxport port MODEL` makes one; `maxport plan MODEL` ranks donors",
            code=1,
        )
    if not as_json:
        click.echo(f"{len(found)} architectures in MAX {max_version()}")
