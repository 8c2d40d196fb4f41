"""Feed a probe to a runner and compare every position's logits with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxport.verify.probes import Probe
from maxport.verify.tolerance import Tolerance


@dataclass(frozen=True)
class Worst:
    """One logit among those that differ most."""

    sequence: int
    position: int
    token: int
    expected: float
    found: float

    @property
    def difference(self) -> float:
        """Absolute difference of the two logits."""
        return abs(self.expected - self.found)


@dataclass(frozen=True)
class Row:
    """The result of one check, as the report shows it.

    Attributes:
        name: Name of the probe or mode.
        verdict: `equal`, `differs`, `unsupported` (the graph does not build so) or `not run`.
        proves: What agreement here shows.
        why: Reason where the verdict is not `equal`; empty otherwise.
        positions: Logit rows compared.
        max_diff: Largest absolute difference; None if nothing was compared.
        mean_diff: Mean absolute difference.
        tolerance: What was allowed, and its derivation.
        same_token: Rows whose largest logit is the reference's.
        clear: Rows whose reference winner leads by more than twice the tolerance.
        per_position: For each sequence the largest difference at each position.
        worst: The logits that differ most, largest first.
        seconds: Wall time.
    """

    name: str
    verdict: str
    proves: str
    why: str = ""
    positions: int = 0
    max_diff: float | None = None
    mean_diff: float | None = None
    tolerance: Tolerance | None = None
    same_token: int = 0
    clear: int = 0
    per_position: Mapping[int, Sequence[float]] = field(default_factory=dict)
    worst: Sequence[Worst] = ()
    seconds: float = 0.0


def run_probe(
    runner: Any, probe: Probe, progress: Callable[[str], None] | None = None
) -> dict[int, np.ndarray]:
    """Logits of all positions by sequence, fed in the probe's steps; the cache starts empty."""
    runner.reset()
    parts: dict[int, list[np.ndarray]] = {key: [] for key in probe.sequences}
    for index, step in enumerate(probe.steps):
        if progress:
            progress(f"{probe.name}: step {index + 1} of {len(probe.steps)}")
        batch = {key: probe.sequences[key][begin:end] for key, (begin, end) in step.items()}
        for key, rows in runner.step(batch).items():
            parts[key].append(rows)
    return {key: np.concatenate(rows) for key, rows in parts.items()}


def compare(
    name: str,
    proves: str,
    expected: Mapping[int, np.ndarray],
    found: Mapping[int, np.ndarray],
    tolerance: Tolerance,
    *,
    seconds: float = 0.0,
) -> Row:
    """Compare logits by sequence; both (positions, vocab), position for position.

    A width that differs, or a value that is not finite, is a difference by itself.
    """
    for key, rows in expected.items():
        if found[key].shape != rows.shape:
            why = f"the port returns logits of shape {found[key].shape}, expected {rows.shape}"
            return Row(name, "differs", proves, why, seconds=seconds)
        if not np.isfinite(found[key]).all():
            at = int(np.argwhere(~np.isfinite(found[key]))[0][0])
            why = f"the port's logits are not finite from position {at} of sequence {key}"
            return Row(name, "differs", proves, why, seconds=seconds)
    gaps = {key: np.abs(rows - found[key]) for key, rows in expected.items()}
    per_position = {key: [float(v) for v in gap.max(axis=1)] for key, gap in gaps.items()}
    largest = max(max(values) for values in per_position.values())
    mean = sum(float(g.sum()) for g in gaps.values()) / sum(g.size for g in gaps.values())
    same, clear, lost = _winners(expected, found, tolerance.value)
    verdict, why = "equal", ""
    if largest > tolerance.value:
        verdict, why = "differs", _where(per_position, tolerance.value, largest)
    elif lost:
        verdict, why = "differs", f"{lost} clear winners of the reference do not win in the port"
    return Row(
        name,
        verdict,
        proves,
        why,
        positions=sum(len(values) for values in per_position.values()),
        max_diff=largest,
        mean_diff=mean,
        tolerance=tolerance,
        same_token=same,
        clear=clear,
        per_position=per_position,
        worst=_worst(expected, found, gaps),
        seconds=seconds,
    )


def _winners(
    expected: Mapping[int, np.ndarray], found: Mapping[int, np.ndarray], tolerance: float
) -> tuple[int, int, int]:
    """Rows with the same winner, rows with a clear winner, and clear rows whose winner changed."""
    same = clear = lost = 0
    for key, rows in expected.items():
        order = np.sort(rows, axis=1)
        is_clear = order[:, -1] - order[:, -2] > 2 * tolerance
        agrees = rows.argmax(axis=1) == found[key].argmax(axis=1)
        same += int(agrees.sum())
        clear += int(is_clear.sum())
        lost += int((is_clear & ~agrees).sum())
    return same, clear, lost


def _where(per_position: Mapping[int, Sequence[float]], allowed: float, largest: float) -> str:
    """Where the logits begin to differ: the pattern often names the fault."""
    firsts = {
        key: next((i for i, value in enumerate(values) if value > allowed), None)
        for key, values in per_position.items()
    }
    bad = {key: at for key, at in firsts.items() if at is not None}
    wrong = sum(value > allowed for values in per_position.values() for value in values)
    total = sum(len(values) for values in per_position.values())
    text = f"differs by up to {largest:.2e} at {wrong} of {total} positions"
    if wrong == total:
        return f"{text}, all of them"
    first = min(bad.values())
    if first == 0:
        return text
    return f"{text}, from position {first} of sequence {min(bad, key=lambda key: bad[key])} on"


def _worst(
    expected: Mapping[int, np.ndarray],
    found: Mapping[int, np.ndarray],
    gaps: Mapping[int, np.ndarray],
    count: int = 5,
) -> list[Worst]:
    """The `count` positions that differ most, each with its worst token."""
    candidates = []
    for key, gap in gaps.items():
        tokens = gap.argmax(axis=1)
        for position in np.argsort(-gap.max(axis=1))[:count]:
            at = int(position), int(tokens[position])
            candidates.append(Worst(key, *at, float(expected[key][at]), float(found[key][at])))
    return sorted(candidates, key=lambda worst: -worst.difference)[:count]
