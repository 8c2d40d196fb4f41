"""The verdict and what it rests on, for people (terminal table) and machines (JSON)."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maxport.verify.compare import Row

if TYPE_CHECKING:
    from rich.console import Console

#: Exit code of each verdict.
EXIT_CODES = {"equal": 0, "differs": 1, "cannot-load": 1, "no-reference": 2, "cannot-judge": 2}


@dataclass(frozen=True)
class Report:
    """Outcome of `verify_port`.

    Attributes:
        verdict: `equal`, `differs`, `cannot-load` (MAX refuses the port or the checkpoint),
            `no-reference` (transformers cannot be the judge) or `cannot-judge`.
        why: One sentence; empty where the verdict is `equal`.
        subject: What was judged, for example the port directory.
        model: The checkpoint, as the user named it.
        weights: `checkpoint`, or `twin` (a small random model of the same architecture).
        engine: `evaluate` or `compile`.
        device: `cpu` or `gpu`.
        encoding: Working precision of the port.
        tier: `smoke`, `coherence` or `logits`.
        proves: What this tier's agreement shows.
        rows: One result for each check.
        notes: What a reader should know besides.
        versions: Packages the verdict depends on.
        seconds: Wall time of each phase.
    """

    verdict: str
    why: str
    subject: str
    model: str
    weights: str
    engine: str
    device: str
    encoding: str
    tier: str
    proves: str
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 equal, 1 a negative verdict, 2 no verdict."""
        return EXIT_CODES[self.verdict]

    @property
    def max_diff(self) -> float | None:
        """Largest difference over all checks."""
        return max((row.max_diff for row in self.rows if row.max_diff is not None), default=None)

    @property
    def tolerance(self) -> float | None:
        """Tolerance of the check with the largest share of its tolerance used up."""
        judged = [
            (row.max_diff, row.tolerance.value)
            for row in self.rows
            if row.max_diff is not None and row.tolerance is not None and row.tolerance.value > 0
        ]
        return max(judged, key=lambda pair: pair[0] / pair[1])[1] if judged else None

    def to_json(self) -> dict[str, Any]:
        """The whole report as JSON-ready values; differences per position included."""
        return {
            "verdict": self.verdict,
            "why": self.why,
            "subject": self.subject,
            "model": self.model,
            "weights": self.weights,
            "engine": self.engine,
            "device": self.device,
            "encoding": self.encoding,
            "tier": self.tier,
            "proves": self.proves,
            "max_diff": self.max_diff,
            "tolerance": self.tolerance,
            "rows": [_row_json(row) for row in self.rows],
            "notes": list(self.notes),
            "versions": self.versions,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "made": datetime.date.today().isoformat(),
        }

    def print_to(self, console: Console) -> None:
        """The table and the verdict on a terminal."""
        from rich.table import Table

        table = Table(title=f"{self.subject} against {self.model}", title_justify="left")
        table.add_column("check")
        table.add_column("positions", justify="right")
        table.add_column("max diff", justify="right")
        table.add_column("allowed", justify="right")
        table.add_column("same token", justify="right")
        table.add_column("verdict")
        for row in self.rows:
            table.add_row(*_cells(row))
        if self.rows:
            console.print(table)
        kind = "the checkpoint's weights" if self.weights == "checkpoint" else "a random twin"
        console.print(
            f"judged on {kind}, {self.encoding}, engine {self.engine}, {self.device}; "
            f"tier {self.tier} shows, where it agrees: {self.proves}",
            highlight=False,
        )
        for note in self.notes:
            console.print(f"note: {note}", highlight=False)
        for row in self.rows:
            if row.why:
                console.print(f"{row.name}: {row.why}", highlight=False, markup=False)
        colour = "green" if self.verdict == "equal" else "red"
        console.print(f"verdict: [{colour}]{self.verdict}[/{colour}]", highlight=False)
        if self.why:
            console.print(self.why, highlight=False, markup=False)


def _cells(row: Row) -> list[str]:
    mark = {"equal": "[green]equal[/green]", "differs": "[red]differs[/red]"}
    if row.max_diff is None or row.tolerance is None:
        count, same = "", ""
        if row.positions:
            count, same = str(row.positions), f"{row.same_token}/{row.positions}"
        return [row.name, count, "", "", same, mark.get(row.verdict, row.verdict)]
    return [
        row.name,
        str(row.positions),
        f"{row.max_diff:.2e}",
        f"{row.tolerance.value:.2e}",
        f"{row.same_token}/{row.positions}",
        mark.get(row.verdict, row.verdict),
    ]


def _row_json(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        "verdict": row.verdict,
        "proves": row.proves,
        "why": row.why,
        "positions": row.positions,
        "max_diff": row.max_diff,
        "mean_diff": row.mean_diff,
        "same_token": row.same_token,
        "clear_winners": row.clear,
        "seconds": round(row.seconds, 3),
    }
    if row.tolerance is not None:
        found["tolerance"] = {
            "value": row.tolerance.value,
            "move": row.tolerance.move,
            "logit_range": row.tolerance.logit_range,
            "dtype": row.tolerance.dtype,
            "derivation": row.tolerance.derivation,
        }
    found["per_position"] = {str(key): list(values) for key, values in row.per_position.items()}
    found["worst"] = [
        {
            "sequence": worst.sequence,
            "position": worst.position,
            "token": worst.token,
            "expected": worst.expected,
            "found": worst.found,
        }
        for worst in row.worst
    ]
    return found
