"""The ReturnLogits modes: the graph of each must return the right rows of the same logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from maxport.verify.compare import Row, compare
from maxport.verify.probes import Probe
from maxport.verify.tolerance import Tolerance

PROVES = {
    "all": "ReturnLogits.ALL: every row, the last rows and the offsets",
    "last": "ReturnLogits.LAST_TOKEN: the last row of every request",
    "variable": "ReturnLogits.VARIABLE: the last n rows of every request and their offsets",
}
#: Rows per request asked of ReturnLogits.VARIABLE; all probes' sequences are longer.
VARIABLE_ROWS = 3


def check_mode(
    runner: Any, probe: Probe, expected: Mapping[int, np.ndarray], tolerance: Tolerance
) -> Row:
    """Run the first step of `probe` and compare what the runner's ReturnLogits mode returns."""
    mode = runner.built.return_logits
    name, proves = f"logits={mode}", PROVES[mode]
    runner.reset()
    step = probe.steps[0]
    batch = {key: probe.sequences[key][begin:end] for key, (begin, end) in step.items()}
    out = runner.outputs(batch, return_n_logits=VARIABLE_ROWS if mode == "variable" else 1)
    seen = {key: expected[key][begin:end] for key, (begin, end) in step.items()}
    want = {key: rows[-1:] for key, rows in seen.items()}
    named = {"next_token_logits": want}
    if mode != "last":
        count = VARIABLE_ROWS if mode == "variable" else 10**9
        named["logits"] = {key: rows[-count:] for key, rows in seen.items()}
    rows: list[Row] = []
    for output, wanted in named.items():
        found = _split(out.named.get(output), wanted)
        if found is None:
            shape = getattr(out.named.get(output), "shape", "nothing")
            total = sum(len(values) for values in wanted.values())
            why = f"{output} is {shape}, expected {total} rows"
            return Row(name, "differs", proves, why)
        rows.append(compare(name, proves, wanted, found, tolerance))
    if mode != "last":
        offsets = np.cumsum([0, *(len(values) for values in named["logits"].values())])
        found_offsets = out.named.get("logit_offsets")
        if found_offsets is None or not np.array_equal(found_offsets.reshape(-1), offsets):
            got = None if found_offsets is None else found_offsets.reshape(-1).tolist()
            why = f"logit_offsets is {got}, expected {offsets.tolist()}"
            return Row(name, "differs", proves, why)
    return max(rows, key=lambda row: (row.verdict != "equal", row.max_diff or 0.0))


def _split(
    rows: np.ndarray | None, wanted: Mapping[int, np.ndarray]
) -> dict[int, np.ndarray] | None:
    """Rows by sequence, in batch order; None if their number is wrong."""
    counts = [len(values) for values in wanted.values()]
    if rows is None or rows.ndim != 2 or rows.shape[0] != sum(counts):
        return None
    parts = np.split(rows, np.cumsum(counts)[:-1])
    return dict(zip(wanted, parts, strict=True))
