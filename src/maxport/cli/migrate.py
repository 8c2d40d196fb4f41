"""Move a MAX model from the V2 graph API to ModuleV3, beside the original."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click


@click.command(epilog="Example: maxport migrate bert -o v3 --prove")
@click.argument("path")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write into.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if anything is V2.")
@click.option("--prove", "proving", is_flag=True, help="Build both graphs and compare them.")
@click.option("--compile", "compiling", is_flag=True, help="Also compile and run both, on the CPU.")
@click.option("--diff", "show_diff", is_flag=True, help="Show the diff.")
@click.option("--html", "page", type=click.Path(path_type=Path), help="Also write an HTML report.")
@click.option("--force", is_flag=True, help="Replace an existing V3 package.")
@click.option("-v", "--verbose", is_flag=True, help="List safe and review rewrites too.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON.")
def command(
    path: str,
    output: Path | None,
    check: bool,
    proving: bool,
    compiling: bool,
    show_diff: bool,
    page: Path | None,
    force: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Write the ModuleV3 variant of PATH as `<name>_modulev3/`; the original is never touched.

    PATH is an installed architecture's name, a folder, or one Python file. The package goes beside
    the original; that of an installed architecture into -o or the current folder. Exit code 1: with
    --check, when there is something to migrate; with --prove, when the graphs are not proven equal.
    """
    from maxport.cli._paths import as_given
    from maxport.migrate import report
    from maxport.migrate.proving import prove_all
    from maxport.migrate.run import migrate
    from maxport.migrate.target import open_target
    from maxport.migrate.typecheck import type_findings
    from maxport.migrate.write import destination, write_package

    target = open_target(path)
    if target.installed and output is None and not check:
        output = Path.cwd()
    base = target.path if target.path.is_dir() else target.folder / "file"
    place = None
    if not check:
        place = destination(base, f"{target.name}_modulev3", output, force=force)
    if page is not None:
        _check_page(page)
    result = migrate(target)
    if result is None:
        click.echo(
            json.dumps({"name": target.name, "changes": []}) if as_json else _nothing(target)
        )
        return
    body: dict[str, Any] = report.to_json(result)
    if place is not None:
        write_package(result.files, place)
        body["written"] = str(place)
    proving = proving or compiling
    if proving:
        body["types"] = type_findings(result.files, result.plan.name)
        body["proof"] = prove_all(result, place, compiling=compiling)
    if page is not None:
        text = report.to_html(result, body.get("proof"), body.get("types"))
        _write_page(page, text)
    if as_json:
        click.echo(json.dumps(body, indent=2))
    else:
        click.echo(report.to_text(result, show_diff=show_diff, verbose=verbose))
        if check:
            click.echo("nothing written, since --check was given")
        if place is not None:
            given = None if target.installed else Path(path)
            original, written = as_given(target.path, given), as_given(place, output or given)
            click.echo(f"written to {written}; {original} is unchanged")
        if proving:
            click.echo(_types(body["types"], verbose))
            click.echo(f"proof: {body['proof']['summary']}")
            for name, summary in body["proof"].get("proofs", {}).items():
                click.echo(f"  {name}: {summary}")
        if compiling:
            click.echo(f"compiled: {_compiled_summary(body['proof'].get('compiled'))}")
    if check or (proving and not _holds(body["proof"], compiling)):
        sys.exit(1)


def _holds(proof: dict[str, Any], compiling: bool) -> bool:
    compiled = proof.get("compiled") or {}
    parallel = (proof.get("parallel") or {}).get("verdict", "equal")
    held = proof["verdict"] == "equal" and parallel in ("equal", "cannot-load")
    return held and (not compiling or bool(compiled.get("equal")))


def _compiled_summary(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run, since the graphs are not proven equal"
    if "error" in found:
        return f"error: {found['error']}"
    count = len(found["tokens"][0][0])
    verdict = "equal" if found["equal"] else "differs"
    return f"{verdict}; logits differ by {found['max_diff']:.2g}, {count} greedy tokens each"


def _check_page(page: Path) -> None:
    """Refuse a place for the HTML report before anything is written."""
    from maxport.errors import MaxportError

    folder = page.parent
    if page.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "it is a folder" if page.is_dir() else f"no writable folder {folder}"
        raise MaxportError(
            f"cannot write the HTML report: {reason}",
            where=str(page),
            fix="give a file in a folder that exists",
        )


def _write_page(page: Path, text: str) -> None:
    from maxport.errors import MaxportError

    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MaxportError(
            f"cannot write the HTML report ({error.strerror})", where=str(page)
        ) from error


def _types(findings: list[str] | None, verbose: bool) -> str:
    """mypy's findings for the terminal."""
    if findings is None:
        return "mypy: not installed here, so the package's types are not checked"
    return "\n".join([f"mypy: {len(findings)} findings", *(findings if verbose else [])])


def _nothing(target: Any) -> str:
    return f"{target.name}: already ModuleV3, nothing to do"
