"""The coherence tier: the port continues text as the reference does, and does not collapse."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxport.verify.compare import Row
from maxport.verify.probes import token_source
from maxport.verify.reference import Reference
from maxport.verify.tolerance import derive

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "The three primary colours are",
    "Water boils at 100 degrees Celsius because",
)
#: Lengths of the prompts where there is no tokenizer.
RANDOM_PROMPTS = (5, 12, 6, 7, 9)
LENGTHS = (64, 256)
#: Share of distinct 4-token runs below which a text counts as collapsed.
COLLAPSE = 0.2


def coherence_rows(
    runner: Any, reference: Reference, folder: Path, progress: Callable[[str], None]
) -> list[Row]:
    """One row for each length: greedy continuations of several prompts, all in one batch.

    The port runs on its own tokens. Where it leaves the reference's text, the reference's two best
    tokens must be a near-tie there. Without a tokenizer (a twin has none) the prompts are random
    tokens, and the rows say so.
    """
    tokenizer = _tokenizer(folder)
    if tokenizer is None:
        draw = token_source(reference.config, 0)
        prompts = [list(draw(length)) for length in RANDOM_PROMPTS]
    else:
        prompts = [list(tokenizer(text)["input_ids"]) for text in PROMPTS]
    note = "" if tokenizer is not None else "the prompts are random tokens: there is no tokenizer"
    room = runner.built.max_length - max(map(len, prompts))
    lengths = [length for length in LENGTHS if length <= room]
    skipped = [_skipped(length, runner.built.max_length) for length in LENGTHS if length > room]
    if not lengths:
        return skipped
    progress("the reference's continuations")
    expected = [reference.greedy(prompt, max(lengths))[len(prompt) :] for prompt in prompts]
    progress("the port's continuations")
    begun = time.perf_counter()
    found = _free_run(runner, prompts, max(lengths))
    seconds = time.perf_counter() - begun
    rows = [_row(n, note, reference, prompts, expected, found, runner, seconds) for n in lengths]
    return rows + skipped


def _skipped(length: int, limit: int) -> Row:
    why = f"the model takes {limit} tokens, prompt included"
    return Row(f"coherence-{length}", "not run", "", why)


def distinct_share(tokens: Sequence[int], run: int = 4) -> float:
    """Share of distinct `run`-token runs; a loop has few, text has many."""
    runs = [tuple(tokens[i : i + run]) for i in range(len(tokens) - run + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def _free_run(runner: Any, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """Greedy continuations of all prompts in one batch, on the runner's own tokens."""
    runner.reset()
    batch: dict[int, Sequence[int]] = dict(enumerate(prompts))
    found: list[list[int]] = [[] for _ in prompts]
    for _ in range(steps):
        logits = runner.step(batch)
        for key, rows in logits.items():
            found[key].append(int(np.argmax(rows[-1])))
        batch = {key: tokens[-1:] for key, tokens in enumerate(found)}
    return found


def _row(
    length: int,
    note: str,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    runner: Any,
    seconds: float,
) -> Row:
    proves = f"{len(prompts)} prompts continued by {length} tokens"
    faults = []
    same = 0
    for index, (want, got) in enumerate(zip(expected, found, strict=True)):
        want, got = want[:length], got[:length]
        at = next(
            (i for i, pair in enumerate(zip(want, got, strict=True)) if len(set(pair)) > 1), length
        )
        same += at
        if at < length and not _near_tie(reference, [*prompts[index], *want[:at]], runner):
            faults.append(f"prompt {index + 1} leaves the reference at token {at + 1}")
        if distinct_share(got) < COLLAPSE <= distinct_share(want):
            faults.append(f"prompt {index + 1} collapses into repetition, the reference does not")
    name = f"coherence-{length}"
    verdict = "differs" if faults else "equal"
    count = length * len(prompts)
    why = "; ".join(faults) or note
    return Row(name, verdict, proves, why, positions=count, same_token=same, seconds=seconds)


def _near_tie(reference: Reference, tokens: Sequence[int], runner: Any) -> bool:
    """Whether the reference's two best next tokens are within twice the tolerance."""
    logits = reference.logits(tokens)
    allowed = derive(reference, {0: tuple(tokens)}, {0: logits}, runner.built.encoding).value
    best = np.sort(logits[-1])[-2:]
    return bool(best[1] - best[0] <= 2 * allowed)


def _tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer, None if it has none."""
    import transformers

    if not any(
        (Path(folder) / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        return None
    return transformers.AutoTokenizer.from_pretrained(folder)
