"""The migration report: counts per file, every rewrite with its line, and the diff."""

from __future__ import annotations

import difflib
import html
from collections import Counter
from dataclasses import asdict
from typing import Any

from maxport.migrate.package import Migrated
from maxport.migrate.rewrite import LEVELS


def counts(result: Migrated) -> dict[str, int]:
    """Rewrites by level, over all files."""
    found = Counter(change.level for change in result.changes)
    return {level: found.get(level, 0) for level in LEVELS}


def per_file(result: Migrated) -> dict[str, dict[str, int]]:
    """Rewrites by level for each file, files without rewrites included."""
    table: dict[str, Counter[str]] = {shown: Counter() for shown in sorted(result.files)}
    for change in result.changes:
        table.setdefault(change.file, Counter())[change.level] += 1
    return {
        shown: {level: found.get(level, 0) for level in LEVELS} for shown, found in table.items()
    }


def diff_of(result: Migrated, shown: str) -> str:
    """Unified diff of one file against its V2 source."""
    before = result.before.get(shown, "").splitlines(keepends=True)
    after = result.files[shown].splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, f"V2/{shown}", f"V3/{shown}"))


def to_json(result: Migrated) -> dict[str, Any]:
    """The report as plain data."""
    plan = result.plan
    return {
        "name": plan.name,
        "source": str(plan.target.path),
        "root": plan.root.dotted,
        "counts": counts(result),
        "files": per_file(result),
        "carried": {m: sorted(names) for m, names in sorted(plan.closure.carried.items())},
        "replaced": sorted(plan.closure.native),
        "not_replaced": plan.closure.reasons,
        "bridged": sorted(plan.closure.bridged),
        "dropped": plan.dropped,
        "changes": [asdict(c) for c in sorted(result.changes, key=lambda c: (c.file, c.line))],
    }


def to_text(result: Migrated, *, show_diff: bool = False, verbose: bool = False) -> str:
    """The report for a terminal: `review` and `manual` rewrites in full, `safe` ones counted."""
    total = counts(result)
    summary = ", ".join(f"{number} {level}" for level, number in total.items())
    lines = [f"{result.plan.target.name} -> {result.plan.name}: {summary}"]
    for shown, found in per_file(result).items():
        numbers = " ".join(f"{level} {number}" for level, number in found.items() if number)
        lines.append(f"  {shown}: {numbers or 'unchanged'}")
    for module, names in sorted(result.plan.closure.carried.items()):
        lines.append(f"  carried over from {module}: {', '.join(sorted(names))}")
    for module, reason in sorted(result.plan.dropped.items()):
        lines.append(f"  left out {module}: {reason}")
    wanted = LEVELS if verbose else ("manual",)
    for change in sorted(result.changes, key=lambda c: (c.file, c.line)):
        if change.level in wanted:
            lines.append(
                f"  {change.file}:{change.line}: {change.level} [{change.codemod}] {change.what}"
            )
    if show_diff:
        lines += [diff_of(result, shown) for shown in sorted(result.before)]
    return "\n".join(lines)


_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
table{border-collapse:collapse}
td,th{padding:.2rem .7rem;text-align:left;border-bottom:1px solid #ddd}
td.n{text-align:right}pre{overflow-x:auto;background:#f6f6f4;padding:.6rem;font-size:12px}
.add{color:#1a6b2f}.del{color:#a02020}.review{color:#8a5a00}.manual{color:#a02020;font-weight:600}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}pre{background:#202020}
.add{color:#7ecb8f}.del{color:#f08a8a}.review{color:#e2b55c}.manual{color:#f08a8a}}
"""


def to_html(
    result: Migrated, proof: dict[str, Any] | None = None, types: list[str] | None = None
) -> str:
    """The report as one self-contained HTML page.

    Args:
        result: The migration.
        proof: `Proof.to_json()` where one was made.
        types: mypy's findings where it ran.
    """
    rows = "".join(
        f"<tr><td>{html.escape(shown)}</td>"
        + "".join(f"<td class=n>{found[level]}</td>" for level in LEVELS)
        + "</tr>"
        for shown, found in per_file(result).items()
    )
    changes = "".join(
        f"<tr class={c.level}><td>{html.escape(c.file)}</td><td class=n>{c.line}</td>"
        f"<td>{c.level}</td><td>{c.codemod}</td><td>{html.escape(c.what)}</td></tr>"
        for c in sorted(result.changes, key=lambda c: (c.file, c.line))
    )
    diffs = "".join(
        f"<details><summary>{html.escape(shown)}</summary><pre>{_diff_html(diff_of(result, shown))}"
        "</pre></details>"
        for shown in sorted(result.before)
    )
    verdict = f"<p>Proof: {html.escape(str(proof.get('summary', '')))}</p>" if proof else ""
    if types is not None:
        listed = html.escape("\n".join(types))
        verdict += f"<details><summary>mypy: {len(types)} findings</summary><pre>{listed}</pre>"
        verdict += "</details>"
    heads = "".join(f"<th>{level}</th>" for level in LEVELS)
    name = html.escape(result.plan.name)
    return (
        f"<!doctype html><meta charset=utf-8><title>{name}</title><style>{_STYLE}</style>"
        f"<h1>{name}</h1><p>From {html.escape(str(result.plan.target.path))}</p>{verdict}"
        f"<table><tr><th>file</th>{heads}</tr>{rows}</table><h2>Rewrites</h2>"
        "<table><tr><th>file</th><th>V2 line</th><th>level</th><th>codemod</th><th>what</th></tr>"
        f"{changes}</table><h2>Diff</h2>{diffs}"
    )


def _diff_html(diff: str) -> str:
    kinds = {"+": "add", "-": "del"}
    return "\n".join(
        f"<span class={kinds[line[0]]}>{html.escape(line)}</span>"
        if line[:1] in kinds
        else html.escape(line)
        for line in diff.splitlines()
    )
