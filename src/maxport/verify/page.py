"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from maxport.verify.compare import Row
from maxport.verify.report import Report

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 760, 180, 56, 22
_COLOURS = ("#2563eb", "#b45309", "#047857", "#7c3aed", "#be123c")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 860px; color: #1f2937;
  padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #e5e7eb; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.equal { color: #047857; } .differs, .cannot-load { color: #b91c1c; font-weight: 600; }
.verdict { font-size: 1.2rem; } .quiet { color: #6b7280; font-size: .9rem; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #6b7280; }
code { background: #f3f4f6; padding: 0 .2rem; }
"""


def html_page(report: Report) -> str:
    """The whole page: verdict, table, a chart for each probe, worst tokens, versions."""
    title = f"{report.subject} against {report.model}"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{escape(report.verdict)}: {escape(title)}</title><style>{_STYLE}</style></head>",
        f"<body><h1>{escape(title)}</h1>",
        f"<p class='verdict'>Verdict: <span class='{report.verdict}'>{report.verdict}</span></p>",
        f"<p>{escape(report.why)}</p>" if report.why else "",
        f"<p>{escape(_conditions(report))}</p>",
        *(f"<p class='quiet'>Note: {escape(note)}</p>" for note in report.notes),
        _table(report.rows),
        *(_section(row) for row in report.rows if row.per_position),
        _facts(report),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _conditions(report: Report) -> str:
    weights = "the checkpoint's weights" if report.weights == "checkpoint" else "a random twin"
    how = "graph evaluated on torch" if report.engine == "evaluate" else "graph compiled by MAX"
    return (
        f"Judged on {weights}, {report.encoding}, {how}, {report.device}. "
        f"Tier {report.tier} shows, where it agrees: {report.proves}."
    )


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    head = (
        "<tr><th>check</th><th>what agreement shows</th><th class='n'>positions</th>"
        "<th class='n'>max diff</th><th class='n'>allowed</th><th>verdict</th></tr>"
    )
    body = []
    for row in rows:
        diff = "" if row.max_diff is None else f"{row.max_diff:.2e}"
        allowed = "" if row.tolerance is None else f"{row.tolerance.value:.2e}"
        text = escape(row.proves) + (f"<br><b>{escape(row.why)}</b>" if row.why else "")
        body.append(
            f"<tr><td>{escape(row.name)}</td><td>{text}</td>"
            f"<td class='n'>{row.positions or ''}</td>"
            f"<td class='n'>{diff}</td><td class='n'>{allowed}</td>"
            f"<td class='{row.verdict.replace(' ', '-')}'>{row.verdict}</td></tr>"
        )
    return f"<table>{head}{''.join(body)}</table>"


def _section(row: Row) -> str:
    allowed = row.tolerance.value if row.tolerance else 0.0
    derivation = escape(row.tolerance.derivation) if row.tolerance else ""
    worst = "".join(
        f"<tr><td class='n'>{w.sequence}</td><td class='n'>{w.position}</td>"
        f"<td class='n'>{w.token}</td><td class='n'>{w.expected:.5f}</td>"
        f"<td class='n'>{w.found:.5f}</td><td class='n'>{w.difference:.2e}</td></tr>"
        for w in row.worst
    )
    return (
        f"<h2>{escape(row.name)}</h2>{_chart(row, allowed)}{_legend(row)}"
        f"<p class='quiet'>Tolerance: {derivation}</p>"
        "<table><tr><th class='n'>sequence</th><th class='n'>position</th><th class='n'>token</th>"
        "<th class='n'>reference</th><th class='n'>port</th><th class='n'>difference</th></tr>"
        f"{worst}</table>"
    )


def _legend(row: Row) -> str:
    marks = "".join(
        f"<span style='color:{_COLOURS[index % len(_COLOURS)]}'>&#9644; sequence {key}, "
        f"{len(series)} positions</span> "
        for index, (key, series) in enumerate(row.per_position.items())
    )
    return f"<p class='quiet'>Largest logit difference at each position: {marks}</p>"


def _chart(row: Row, allowed: float) -> str:
    """Largest difference at each position, logarithmic, one line per sequence, as inline SVG."""
    values = [v for series in row.per_position.values() for v in series if v > 0]
    low = math.floor(math.log10(min([*values, allowed or 1.0])))
    high = max(math.ceil(math.log10(max([*values, allowed or 1e-9]))), low + 1)
    longest = max(len(series) for series in row.per_position.values())
    inner = _HEIGHT - _BOTTOM

    def x(position: int) -> float:
        return _LEFT + position * (_WIDTH - _LEFT - 8) / max(longest - 1, 1)

    def y(value: float) -> float:
        level = max(math.log10(value) if value > 0 else low, low)
        return 6 + (high - level) / (high - low) * (inner - 6)

    parts = [f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>"]
    parts.append(f"<title>Largest logit difference by position, {escape(row.name)}</title>")
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(
            f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{at:.1f}' y2='{at:.1f}' stroke='#e5e7eb'/>"
            f"<text x='{_LEFT - 6}' y='{at + 4:.1f}' text-anchor='end'>1e{power}</text>"
        )
    for index, (key, series) in enumerate(row.per_position.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(series))
        parts.append(
            f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.5'/>"
            f"<circle cx='{x(len(series) - 1):.1f}' cy='{y(series[-1]):.1f}' r='2.5' "
            f"fill='{colour}'><title>sequence {key}</title></circle>"
        )
    if allowed > 0:
        at = y(allowed)
        parts.append(
            f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{at:.1f}' y2='{at:.1f}' stroke='#b91c1c' "
            f"stroke-dasharray='5 4'/><text x='{_WIDTH - 4}' y='{at - 4:.1f}' text-anchor='end'>"
            "allowed</text>"
        )
    parts.append(
        f"<text x='{_LEFT}' y='{_HEIGHT - 4}'>position 0</text>"
        f"<text x='{_WIDTH - 4}' y='{_HEIGHT - 4}' text-anchor='end'>{longest - 1}</text></svg>"
    )
    return "".join(parts)


def _facts(report: Report) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in report.seconds.items())
    return f"<h2>Conditions</h2><p class='quiet'>{escape(versions)}<br>{escape(seconds)}</p>"
