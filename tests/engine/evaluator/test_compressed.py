"""DeepSeek V4's kernels against plain formulas: rounding, pooling, scores, attention, gates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxport.engine.evaluator.kernels import compressed

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 3))
SEEDS = st.integers(0, 2**31)


def call(shape: list[int] | None = None, **attributes: Any) -> Any:
    """A kernel call with attributes and one float32 result."""
    return SimpleNamespace(
        attribute=lambda name, default=None: attributes.get(name, default),
        shape=lambda index=0: shape,
        dtype=lambda index=0: torch.float32,
    )


def random(seed: int, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def leaf(rows: torch.Tensor, slots: int, kinds: int = 1) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Cache operands that hold rows[kind, sequence, position, width], pages dealt backwards."""
    count, length = rows.shape[1], rows.shape[2]
    pages = -(-length // slots)
    blocks = torch.full((count * pages + 1, kinds, 1, slots, 1, rows.shape[3]), 99.0)
    table = torch.arange(count * pages, 0, -1).reshape(count, pages)
    for kind in range(kinds):
        for sequence in range(count):
            for position in range(length):
                page = table[sequence, position // slots]
                blocks[page, kind, 0, position % slots, 0] = rows[kind, sequence, position]
    nothing = torch.zeros(1)
    return [blocks, nothing, torch.zeros(count), table, nothing, nothing], torch.tensor(0)


@settings(max_examples=20, deadline=None)
@given(SHAPES, SEEDS)
def test_float8_blocks_have_powers_of_two_as_scales(shape: tuple[int, int], seed: int) -> None:
    x = random(seed, shape[0], 64 * shape[1]) * 10.0 ** (seed % 7 - 3)
    snapped = compressed.snap_to_fp8(x)
    assert torch.equal(compressed.snap_to_fp8(snapped), snapped)
    error = (snapped - x).abs().unflatten(1, (-1, 64))
    assert (error <= x.abs().unflatten(1, (-1, 64)).amax(-1, keepdim=True) / 16).all()


def test_float8_keeps_what_it_can_hold() -> None:
    x = torch.tensor([448.0, -0.5, 1.0, 3.5] * 16)
    assert torch.equal(compressed.snap_to_fp8(x), x)
    assert torch.equal(compressed.snap_to_fp8(torch.zeros(64)), torch.zeros(64))


def test_float4_rounds_ties_to_even() -> None:
    values = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -5.0]
    snapped = compressed.snap_to_fp4(torch.tensor(values + [0.0] * 22))[: len(values)]
    assert snapped.tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -1, -4]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6))
def test_hadamard_is_orthonormal(power: int) -> None:
    matrix = compressed.hadamard(2**power)
    assert torch.allclose(matrix @ matrix.T, torch.eye(2**power), atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 25), SEEDS)
def test_the_mixer_is_doubly_stochastic(streams: int, rounds: int, seed: int) -> None:
    width = 2 * streams + streams * streams
    pre, post, mixer = compressed.hyper_connection_gates(
        call(hc_mult=streams, hc_sinkhorn_iters=rounds),
        random(seed, 3, width),
        random(seed + 1, width),
        torch.tensor([0.5, 1.5, 0.7]),
        torch.tensor(1e-6),
    )
    assert ((pre > 0) & (pre < 1.001)).all() and ((post > 0) & (post < 2)).all()
    square = mixer.unflatten(1, (streams, streams))
    assert torch.allclose(square.sum(-2), torch.ones(3, streams), atol=1e-4)
    if rounds > 15:
        assert torch.allclose(square.sum(-1), torch.ones(3, streams), atol=5e-2)


def test_top_k_keeps_each_row_to_its_count() -> None:
    x = torch.tensor([[1.0, 4.0, 2.0, 3.0], [9.0, 8.0, 7.0, 6.0]])
    best, index = compressed.top_k_per_row(call(max_k=3), x, torch.tensor([2, 0]))
    assert index.tolist() == [[1, 3, -1], [-1, -1, -1]]
    assert best[0].tolist() == [4, 3, -torch.inf] and (best[1] == -torch.inf).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 5), SEEDS)
def test_attention_sees_its_window_and_the_chosen_entries(
    tokens: int, window: int, entries: int, seed: int
) -> None:
    heads, width = 2, 8
    latents, far = random(seed, 1, 1, tokens, width), random(seed + 1, 1, 1, entries, width)
    q, sinks = random(seed + 2, tokens, heads, width), random(seed + 3, heads)
    chosen = torch.full((tokens, 3), -1)
    chosen[:, 1] = torch.arange(tokens) % entries
    near_operands, layer = leaf(latents, 4)
    far_operands, _ = leaf(far, 2)
    got = compressed.latent_sparse_attention(
        call(window=window), q, torch.tensor([0, tokens]), chosen, sinks,
        *near_operands, *far_operands, layer, layer, torch.tensor(0.3),
    )  # fmt: skip
    for token in range(tokens):
        rows = torch.cat(
            [latents[0, 0, max(0, token - window + 1) : token + 1], far[0, 0, [token % entries]]]
        )
        scores = torch.cat([q[token] @ rows.T * 0.3, sinks[:, None]], 1)
        want = torch.softmax(scores, 1)[:, :-1] @ rows
        assert torch.allclose(got[token], want, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 6), st.integers(1, 6), SEEDS)
def test_scores_of_old_and_fresh_entries(base: int, fresh: int, seed: int) -> None:
    heads, width, half = 3, 8, 8
    rows = random(seed, 1, 1, base + fresh, width)
    q, weights = random(seed + 1, fresh, heads, width), random(seed + 2, fresh, heads)
    cutoff = base + 1 + torch.arange(fresh)
    operands, layer = leaf(rows, 4)
    got = compressed.indexer_score(
        call([fresh, 2 * half]), q, weights, torch.tensor([0, fresh]), torch.tensor([base]),
        cutoff, *operands, layer,
    )  # fmt: skip
    for token in range(fresh):
        for entry in range(base + fresh):
            column = entry if entry < base else half + entry - base
            want = (torch.relu(q[token] @ rows[0, 0, entry]) * weights[token]).sum()
            if entry >= int(cutoff[token]):
                want = torch.tensor(0.0)
            assert got[token, column] == pytest.approx(float(want), abs=1e-4)
    assert (got[:, base:half] == 0).all() and (got[:, half + fresh :] == 0).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 22), st.integers(0, 21), st.booleans(), st.booleans(), SEEDS)
def test_windows_are_the_same_however_the_tokens_come(
    length: int, split: int, overlap: bool, turned: bool, seed: int
) -> None:
    ratio, entry, split = 4, 64, min(split, length - 1)
    width = entry * (2 if overlap else 1)
    kv, score = random(seed, length, width), random(seed + 1, length, width)
    ape, weight = random(seed + 2, ratio, width), random(seed + 3, entry)
    frequencies = random(seed + 4, 32, 0 if not turned else 4, 2)
    operands, layer = leaf(torch.stack([kv, score])[:, None], 4, kinds=2)

    def windows(start: int) -> torch.Tensor:
        new = length - start
        count = -(-(length - (start - start % ratio)) // ratio)
        return compressed.compress_windows(
            call([count, entry], rotate=turned), kv[start:], score[start:], ape, weight,
            frequencies, torch.tensor([0, new]), torch.tensor([0, count]), torch.tensor([start]),
            *operands, layer, torch.tensor(1e-5),
        )  # fmt: skip

    whole, rest = windows(0), windows(split)
    assert torch.allclose(whole[split // ratio :], rest, atol=1e-5)
