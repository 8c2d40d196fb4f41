"""What is fed: schedules, lengths past the edges that a config names, no special tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxport.verify.probes import (
    Probe,
    chunked,
    fitted,
    original_length_of,
    standard_probes,
    token_source,
    window_of,
)


def config(**values: Any) -> Any:
    return SimpleNamespace(vocab_size=50, pad_token_id=0, eos_token_id=[1, 2], **values)


def greedy(tokens: Any, steps: int) -> list[int]:
    return [*tokens, *([9] * steps)]


def build(settings: Any, **options: Any) -> tuple[dict[str, Probe], list[str]]:
    defaults = {"steps": 6, "max_length": 512, "max_positions": 1200}
    probes, skipped = standard_probes(settings, greedy, **{**defaults, **options})
    return {probe.name: probe for probe in probes}, [item.name for item in skipped]


def covered(probe: Probe) -> bool:
    """Every token of every sequence is fed once, in order."""
    at = dict.fromkeys(probe.sequences, 0)
    for step in probe.steps:
        for key, (begin, end) in step.items():
            if begin != at[key] or end <= begin:
                return False
            at[key] = end
    return at == {key: len(tokens) for key, tokens in probe.sequences.items()}


def test_every_probe_feeds_every_token_once() -> None:
    probes, skipped = build(config(sliding_window=6, layer_types=["sliding_attention"]))
    assert list(probes) == ["ragged", "chunked", "decode", "window"]
    assert skipped == []
    assert all(covered(probe) for probe in probes.values())
    assert len(probes["decode"].steps) == 7
    assert len(probes["ragged"].steps) == 1


@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(1, 200))
def test_chunks_cover_whatever_the_sizes(sizes: list[int], length: int) -> None:
    base = Probe("ragged", "", {0: tuple(range(length)), 1: (1, 2)}, ())
    assert covered(chunked(base, sizes))


def test_prompts_cross_a_page_and_have_unequal_lengths() -> None:
    probes, _ = build(config())
    lengths = [len(tokens) for tokens in probes["ragged"].sequences.values()]
    assert len(set(lengths)) == 3 and max(lengths) > 128
    ends = [len(tokens) for tokens in probes["decode"].sequences.values()]
    assert len(set(ends)) == 3


def test_special_tokens_are_never_drawn() -> None:
    draw = token_source(config(), 0)
    assert set(draw(2000)) == set(range(3, 50))


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        ({"sliding_window": 7}, 7),
        ({"sliding_window": None}, None),
        ({"sliding_window": 7, "use_sliding_window": False}, None),
        ({"sliding_window": 7, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}, 7),
        ({"attention_chunk_size": 5}, 5),
    ],
)
def test_the_window_in_use(settings: dict[str, Any], width: int | None) -> None:
    assert window_of(config(**settings)) == width


def test_the_window_probe_runs_past_the_window() -> None:
    probes, _ = build(config(sliding_window=20))
    assert len(probes["window"].sequences[0]) == 29
    assert len(probes["window"].steps) == 7


def test_an_edge_out_of_reach_is_reported_and_not_forgotten() -> None:
    probes, skipped = build(config(sliding_window=4096))
    assert "window" not in probes and skipped == ["window"]
    _, skipped = build(config(sliding_window=600), max_length=608)
    assert skipped == ["window"]


def test_original_length_wherever_it_is_kept() -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    assert original_length_of(config(rope_parameters=rope)) == 64
    nested = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert original_length_of(config(rope_parameters=nested)) == 64
    assert original_length_of(config(rope_parameters={"rope_type": "default"})) is None
    probes, _ = build(config(rope_parameters=rope))
    assert len(probes["rope"].sequences[0]) == 73
    assert max(len(tokens) for tokens in probes["ragged"].sequences.values()) > 128


def test_longrope_is_judged_on_each_side_of_its_switch() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 22}
    probes, _ = build(config(rope_parameters=rope), steps=48)
    for name in ("ragged", "chunked", "decode"):
        lengths = [len(tokens) for tokens in probes[name].sequences.values()]
        assert max(lengths) <= 22 and len(set(lengths)) == 3, name
    assert [len(step) for step in probes["rope"].steps] == [1]
    assert len(probes["rope"].sequences[0]) == 31


def test_prompts_no_longer_than_asked_for() -> None:
    probes, _ = build(config(sliding_window=100), longest=64, steps=48)
    for name in ("ragged", "chunked", "decode"):
        lengths = [len(tokens) for tokens in probes[name].sequences.values()]
        assert max(lengths) == 64 and len(set(lengths)) == 3, name
    assert len(probes["window"].sequences[0]) == 109


@given(st.integers(3, 500))
def test_fitted_lengths_stay_unequal(limit: int) -> None:
    lengths = fitted((5, 150, 29), limit)
    assert max(lengths) <= max(limit, 3)
    assert min(lengths) >= 1
