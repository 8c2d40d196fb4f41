"""What is fed to port and reference: token sequences and the steps in which they are fed.

Every probe is a set of sequences and a schedule. The reference sees each sequence whole and alone;
the port sees it cut up, next to others, through its cache. Logits must not notice the difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: One step: sequence id -> the slice (begin, end) of its tokens that is fed.
Step = Mapping[int, tuple[int, int]]

#: Lengths that share no factor, end in different pages, and cross a page boundary (128) once.
RAGGED = (5, 150, 29)
PROMPTS = (4, 17, 120)


@dataclass(frozen=True)
class Probe:
    """One way of feeding sequences.

    Attributes:
        name: Short name, as in tables.
        proves: What agreement here shows.
        sequences: Sequence id -> all its tokens.
        steps: The schedule; every token of every sequence is fed exactly once, in order.
    """

    name: str
    proves: str
    sequences: Mapping[int, tuple[int, ...]]
    steps: tuple[Step, ...]

    @property
    def positions(self) -> int:
        """Tokens fed, all sequences together."""
        return sum(len(tokens) for tokens in self.sequences.values())


@dataclass(frozen=True)
class Skipped:
    """A probe that the checkpoint calls for but that was not run, and why."""

    name: str
    why: str


def ragged(draw: Callable[[int], tuple[int, ...]], limit: int) -> Probe:
    """Three prompts of unequal length, none longer than `limit`, in one batch."""
    lengths = fitted(RAGGED, limit)
    sequences = {index: draw(length) for index, length in enumerate(lengths)}
    step = {key: (0, len(tokens)) for key, tokens in sequences.items()}
    return Probe("ragged", "a batch of unequal lengths, prefilled at once", sequences, (step,))


def chunked(base: Probe, sizes: Sequence[int] = (3, 61, 1, 40, 64)) -> Probe:
    """The sequences of `base`, each cut at the same uneven places."""
    cuts = np.cumsum([0, *sizes, 10**9]).tolist()
    steps: list[Step] = []
    for begin, end in itertools.pairwise(cuts):
        step = {
            key: (begin, min(end, len(tokens)))
            for key, tokens in base.sequences.items()
            if len(tokens) > begin
        }
        if step:
            steps.append(step)
    return Probe("chunked", "the same prompts in uneven chunks", base.sequences, tuple(steps))


def decode(
    draw: Callable[[int], tuple[int, ...]],
    greedy: Callable[[Sequence[int], int], list[int]],
    steps: int,
    limit: int,
) -> Probe:
    """Prompts continued by the reference's own greedy tokens, one token per step."""
    steps = min(steps, limit // 2)
    lengths = fitted(PROMPTS, limit - steps)
    prompts = {index: draw(length) for index, length in enumerate(lengths)}
    sequences = {key: tuple(greedy(prompt, steps)) for key, prompt in prompts.items()}
    first: Step = {key: (0, len(prompt)) for key, prompt in prompts.items()}
    rest: list[Step] = [
        {key: (len(prompt) + index, len(prompt) + index + 1) for key, prompt in prompts.items()}
        for index in range(steps)
    ]
    proves = f"{steps} greedy tokens through the cache, all requests at once"
    return Probe("decode", proves, sequences, (first, *rest))


def past(
    name: str, limit: int, proves: str, draw: Callable[[int], tuple[int, ...]], *, steps: int = 6
) -> Probe:
    """One prompt that runs past `limit`, then single tokens, beside a short one.

    Without decode steps the prompt runs alone: where all positions depend on the length of the
    whole, a cache filled before the limit holds other values than one forward over everything.
    """
    long, short = draw(limit + 9), draw(min(7, limit))
    if steps == 0:
        return Probe(name, proves, {0: long}, ({0: (0, len(long))},))
    first: Step = {0: (0, len(long) - steps), 1: (0, len(short))}
    rest: list[Step] = [
        {0: (len(long) - steps + index, len(long) - steps + index + 1)} for index in range(steps)
    ]
    return Probe(name, proves, {0: long, 1: short}, (first, *rest))


def token_source(config: Any, seed: int) -> Callable[[int], tuple[int, ...]]:
    """A source of random prompts over the vocabulary without the config's special tokens."""
    special = {
        value
        for key in ("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id")
        for value in _as_list(getattr(config, key, None))
    }
    allowed = np.array([t for t in range(int(config.vocab_size)) if t not in special])
    rng = np.random.default_rng(seed)
    return lambda length: tuple(int(token) for token in rng.choice(allowed, length))


def window_of(config: Any) -> int | None:
    """Width of the narrowest sliding window or attention chunk in use; None if all is global."""
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds == {"full_attention"} or getattr(config, "use_sliding_window", True) is False:
        return None
    found = [getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size")]
    widths = [width for width in found if isinstance(width, int) and width > 0]
    return min(widths, default=None)


def original_length_of(config: Any) -> int | None:
    """`original_max_position_embeddings`, wherever the config keeps it; None without scaling."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    tables = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for table in tables:
        if isinstance(table.get("original_max_position_embeddings"), int):
            return int(table["original_max_position_embeddings"])
    value = getattr(config, "original_max_position_embeddings", None)
    return int(value) if isinstance(value, int) else None


def fitted(lengths: Sequence[int], limit: int) -> list[int]:
    """`lengths`, scaled down where they exceed `limit`, still unequal and at least 1.

    At least 3 where `limit` allows it: ReturnLogits.VARIABLE asks for so many rows of each.
    """
    longest = max(lengths)
    if longest <= limit:
        return list(lengths)
    least = min(3, max(1, limit // 5))
    return [max(index + least, length * limit // longest) for index, length in enumerate(lengths)]


def depends_on_length(config: Any) -> bool:
    """Whether the rotation of a position depends on how long the sequence is (LongRoPE)."""
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(table.get("rope_type", table.get("type")) == "longrope" for table in tables)


def standard_probes(
    config: Any,
    greedy: Callable[[Sequence[int], int], list[int]],
    *,
    steps: int,
    max_length: int,
    max_positions: int,
    longest: int | None = None,
    seed: int = 0,
) -> tuple[list[Probe], list[Skipped]]:
    """The probes a text model calls for, and those that were left out with the reason.

    Args:
        config: The reference's text config.
        greedy: Continues a prompt by the reference's greedy tokens.
        steps: Decode steps.
        max_length: Longest sequence the graph takes.
        max_positions: Longest sequence worth its time.
        longest: Longest sequence of the ragged, chunked and decode probes; None for their own.
        seed: Of the random prompts.
    """
    draw = token_source(config, seed)
    original = original_length_of(config)
    switches = original is not None and depends_on_length(config)
    limit = min(max_length, original) if original and switches else max_length
    limit = min(limit, longest or limit)
    first = ragged(draw, limit)
    probes = [first, chunked(first), decode(draw, greedy, steps, limit)]
    skipped: list[Skipped] = []
    wanted = [
        ("window", window_of(config), "prompt and decode past the sliding window"),
        ("rope", original, "positions past original_max_position_embeddings"),
    ]
    for name, edge, proves in wanted:
        if edge is None:
            continue
        if edge + 9 > min(max_length, max_positions):
            most = "the graph takes" if max_length <= max_positions else "--max-positions allows"
            least = min(max_length, max_positions)
            skipped.append(Skipped(name, f"needs {edge + 9} tokens, {most} {least}"))
            continue
        alone = name == "rope" and switches
        probes.append(past(name, edge, proves, draw, steps=0 if alone else 6))
    return probes, skipped


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)]
