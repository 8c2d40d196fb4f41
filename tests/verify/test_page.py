"""The report's page: self-contained, and every mark of a chart lies on it."""

from __future__ import annotations

import re

import pytest

from maxport.verify.compare import Row, Worst
from maxport.verify.page import html_page
from maxport.verify.report import Report
from maxport.verify.tolerance import Tolerance


def report(largest: float, allowed: float) -> Report:
    row = Row(
        "ragged",
        "equal" if largest <= allowed else "differs",
        "a batch <of> unequal lengths",
        "" if largest <= allowed else "differs & how",
        positions=3,
        max_diff=largest,
        mean_diff=largest / 2,
        tolerance=Tolerance(allowed, allowed / 4, 10.0, "float32"),
        per_position={0: [0.0, largest / 10, largest], 1: [largest / 3]},
        worst=[Worst(0, 2, 7, 1.0, 1.0 + largest)],
    )
    return Report(
        row.verdict, row.why, "a port", "a <model>", "twin", "evaluate", "cpu", "float32",
        "logits", "everything", rows=(row,), versions={"max": "26.7.0"}, seconds={"total": 1.0},
    )  # fmt: skip


@pytest.mark.parametrize("largest", [1e-7, 3e-5, 0.4, 1.0, 57.0])
@pytest.mark.parametrize("allowed", [1e-6, 2e-4, 1.0])
def test_every_mark_lies_on_its_chart(largest: float, allowed: float) -> None:
    page = html_page(report(largest, allowed))
    heights = [float(y) for y in re.findall(r" (?:y1|cy)='([-\d.]+)'", page)]
    heights += [
        float(point.split(",")[1])
        for points in re.findall(r"points='([^']+)'", page)
        for point in points.split()
    ]
    assert len(heights) > 6
    assert min(heights) >= 0 and max(heights) <= 180


def test_the_page_needs_nothing_else_and_escapes_what_it_shows() -> None:
    page = html_page(report(0.4, 2e-4))
    assert not re.search(r"(?:src|href)=|@import|url\(", page)
    assert "a &lt;model&gt;" in page and "<model>" not in page
    assert "differs &amp; how" in page and "a batch &lt;of&gt; unequal lengths" in page
    for shown in ("26.7.0", "2.00e-04", "4 x 5.00e-05", "judged on a random twin"):
        assert shown.lower() in page.lower()
