"""One dense family: port it from a twin, and judge the port at a size that was not traced.

python bench/family_row.py llama qwen2            one JSON line per family, by evaluation
python bench/family_row.py --compile llama qwen2  these in one compile on CPU
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Lengths of the ragged batch, tokens of one prefill chunk, and decode steps.
LENGTHS, CHUNK, STEPS = (12, 7, 15), 5, 16
#: Share of the logit range that a float32 port may differ by.
TOLERANCE = 2e-5
#: The twin that is judged; 0 and 1 are the ones traced.
JUDGED_SIZE = 2
#: Longest request of models that have no bound of their own.
UNBOUNDED = 256
#: Sliding window in compiled runs: the smallest that MAX's CPU kernel takes is 128.
COMPILED_WINDOW, COMPILED_LENGTHS = 130, (150, 12, 33)


@dataclass
class Family:
    """One family's port with its checkpoint at the judged size, on disk."""

    name: str
    port_dir: Path
    checkpoint: Path
    row: dict[str, Any]
    bounded: bool = True
    built: Any = None
    model: Any = None


def make(name: str, folder: Path, *, window: int | None, config: Any = None) -> Family:
    """Port `name`, by its class's own configuration or `config`, and save the judged twin."""
    from maxport.emit.write import write_port
    from maxport.trace.port import make_port
    from maxport.twin import default_config, save_twin, twin_config, twin_model

    slug = "port_" + re.sub(r"\W", "_", name)
    config = config or default_config(name)
    start = time.monotonic()
    port = make_port(config, slug=slug)
    traced = time.monotonic()
    port_dir = write_port(folder / "ports", slug, port.files, force=True)
    written = time.monotonic()
    judged = twin_config(config, JUDGED_SIZE, window=window)
    checkpoint = folder / f"{slug}-checkpoint"
    save_twin(judged, checkpoint)
    study = port.study
    idioms: dict[str, int] = {}
    for finding in study.findings:
        if finding.accepted:
            idioms[finding.op] = idioms.get(finding.op, 0) + 1
    graph = (port_dir / f"{slug}.py").read_text("utf-8")
    row = {
        "name": name,
        "covered": study.covered,
        "traced": study.total,
        "coverage": round(study.covered / study.total, 4),
        "idioms": idioms,
        "plain": study.plain,
        "lines": graph.count("\n"),
        "seconds": {"trace": round(traced - start, 2), "emit": round(written - traced, 2)},
    }
    bounded = port.spec.max_length is not None
    return Family(name, port_dir, checkpoint, row, bounded, model=twin_model(judged))


def build(family: Family) -> None:
    """Build the port's MAX graph for the judged checkpoint."""
    from maxport.engine.build import build_port

    start = time.monotonic()
    length = None if family.bounded else UNBOUNDED
    family.built = build_port(
        family.port_dir, family.checkpoint, return_logits="all", max_length=length
    )
    family.row["seconds"]["build"] = round(time.monotonic() - start, 2)


def sequences(vocab: int, lengths: Sequence[int]) -> dict[int, list[int]]:
    """Random token ids: each prompt with its decode steps."""
    rng = np.random.default_rng(7)
    return {i: rng.integers(3, vocab - 1, n + STEPS).tolist() for i, n in enumerate(lengths)}


def reference(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """transformers' logits of one sequence alone, float32 (length, vocab)."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()


def judge(runner: Any, model: Any, vocab: int, lengths: Sequence[int]) -> tuple[float, float]:
    """(largest difference over all probes, largest logit): prefill, ragged, chunked, decode."""
    batch = sequences(vocab, lengths)
    truth = {i: reference(model, t) for i, t in batch.items()}
    worst = 0.0

    def check(i: int, got: np.ndarray, start: int) -> None:
        nonlocal worst
        want = truth[i][start : start + len(got)]
        worst = max(worst, float(np.abs(got - want).max()))

    runner.reset()
    prompts = {i: t[:-STEPS] for i, t in batch.items()}
    for i, got in runner.step({0: prompts[0]}).items():
        check(i, got, 0)
    runner.reset()
    for i, got in runner.step(prompts).items():
        check(i, got, 0)
    for step in range(STEPS):
        fed = {i: [t[len(prompts[i]) + step]] for i, t in batch.items()}
        for i, got in runner.step(fed).items():
            check(i, got, len(prompts[i]) + step)
    runner.reset()
    for start in range(0, len(prompts[0]), CHUNK):
        for i, got in runner.step({0: prompts[0][start : start + CHUNK]}).items():
            check(i, got, start)
    return worst, max(float(np.abs(t).max()) for t in truth.values())


def finish(family: Family, runner: Any, engine: str, lengths: Sequence[int]) -> dict[str, Any]:
    """Judge one family and complete its row."""
    start = time.monotonic()
    vocab = int(family.model.config.get_text_config().vocab_size)
    difference, top = judge(runner, family.model, vocab, lengths)
    family.row["seconds"]["run"] = round(time.monotonic() - start, 2)
    tolerance = TOLERANCE * top
    family.row |= {
        "engine": engine,
        "max_diff": difference,
        "tolerance": tolerance,
        "verdict": "equal" if difference <= tolerance else "differs",
        "why": "" if difference <= tolerance else f"{difference / top:.1e} of the logit range",
    }
    return family.row


def refused(name: str, engine: str, error: Exception) -> dict[str, Any]:
    """The row of a family that could not be judged."""
    from maxport.errors import MaxportError

    kind = "refused" if isinstance(error, MaxportError) else "error"
    return {
        "name": name, "engine": engine, "verdict": kind, "max_diff": None, "tolerance": None,
        "coverage": None, "idioms": {}, "plain": {}, "seconds": {},
        "why": re.sub(r"\S*maxport-families-\w+/", "", f"{type(error).__name__}: {error}")[:400],
    }  # fmt: skip


def evaluate(names: Sequence[str], folder: Path) -> None:
    """Print one row per family, judged by evaluating the built graph."""
    from maxport.engine.runner import EvaluatedRunner

    for name in names:
        try:
            family = make(name, folder, window=None)
            build(family)
            row = finish(family, EvaluatedRunner(family.built), "evaluate", LENGTHS)
        except Exception as error:  # every failure is a row of the table
            row = refused(name, "evaluate", error)
        print(json.dumps(row), flush=True)


def compile_all(names: Sequence[str], folder: Path) -> None:
    """Print one row per family, judged by one compile of all their graphs on CPU."""
    from maxport.engine.compile import compile_graphs

    families = []
    for name in names:
        try:
            family = make(name, folder, window=COMPILED_WINDOW)
            build(family)
            families.append(family)
        except Exception as error:
            print(json.dumps(refused(name, "compile-cpu", error)), flush=True)
    start = time.monotonic()
    runners = compile_graphs([f.built for f in families])
    share = round((time.monotonic() - start) / max(len(families), 1), 1)
    from maxport.engine.runner import EvaluatedRunner

    for family, runner in zip(families, runners, strict=True):
        family.row["seconds"]["compile"] = share
        try:
            row = finish(family, runner, "compile-cpu", COMPILED_LENGTHS)
            row["evaluated_diff"] = engines_apart(family, runner, EvaluatedRunner(family.built))
        except Exception as error:
            row = refused(family.name, "compile-cpu", error)
        print(json.dumps(row), flush=True)


def engines_apart(family: Family, compiled: Any, evaluated: Any) -> float:
    """Largest difference between the compiled and the evaluated logits, over the logit range."""
    vocab = int(family.model.config.get_text_config().vocab_size)
    batch = sequences(vocab, COMPILED_LENGTHS)
    compiled.reset()
    a, b = compiled.step(batch), evaluated.step(batch)
    top = max(float(np.abs(x).max()) for x in b.values())
    return max(float(np.abs(a[i] - b[i]).max()) for i in batch) / top


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="maxport-families-") as temp:
        run = compile_all if options.compile else evaluate
        run(options.names, Path(temp))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
