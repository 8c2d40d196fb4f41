"""Idioms of transformers models: the right parameters, and only if the numbers agree."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from maxport.idioms import Finding, coverage, norms, recognise
from maxport.idioms.base import Candidate, Recogniser
from maxport.ir import Graph
from maxport.trace.study import trace_twin
from maxport.twin import default_config, twin_config


@cache
def recognised(model_type: str) -> tuple[Graph, list[Finding]]:
    graph, values, _ = trace_twin(twin_config(default_config(model_type)))
    return graph, recognise(graph, values)


def first(model_type: str, op: str) -> Any:
    return next(n for n in recognised(model_type)[0].nodes if n.op == op)


def test_all_of_llama_is_recognised() -> None:
    graph, findings = recognised("llama")
    inside, traced = coverage(graph)
    assert inside == traced and all(f.accepted for f in findings)


@pytest.mark.parametrize(
    ("model_type", "offset", "before_cast"),
    [("llama", 0.0, False), ("gemma", 1.0, True), ("olmo2", 0.0, True)],
)
def test_rms_norm_variants(model_type: str, offset: float, before_cast: bool) -> None:
    norm = first(model_type, "rms_norm")
    assert norm.attrs["offset"] == offset
    assert norm.attrs["multiply_before_cast"] is before_cast
    eps = getattr(twin_config(default_config(model_type)), "rms_norm_eps", None)
    assert norm.attrs["eps"] == pytest.approx(eps)


@pytest.mark.parametrize(
    ("model_type", "interleaved", "partial"),
    [("llama", False, False), ("ernie4_5", True, False), ("glm", True, True), ("phi", False, True)],
)
def test_rotary_variants(model_type: str, interleaved: bool, partial: bool) -> None:
    rope = first(model_type, "rope")
    rotation = rope.attrs["rotation"]
    assert rotation.interleaved is interleaved
    assert (rotation.width < rope.shape[-1]) is partial


def test_a_sliding_window_is_read_off_the_mask() -> None:
    window = twin_config(default_config("mistral")).sliding_window
    attend = first("mistral", "attend")
    assert (attend.attrs["mask"], attend.attrs["window"]) == ("sliding", window)


def test_written_out_attention_with_alibi_is_measured() -> None:
    attend = first("bloom", "attend")
    assert attend.attrs["mask"] == "causal" and len(attend.attrs["slopes"]) > 1


def test_a_candidate_whose_numbers_differ_is_refused() -> None:
    graph, values, _ = trace_twin(twin_config(default_config("llama")))
    recogniser = Recogniser(graph, values)
    node = next(n for n in graph.nodes if n.op == "linear")
    before = node.op, list(node.args)
    source = node.args[0]
    width = node.shape[-1]
    wrong = Candidate(node.name, "linear", [source], {}, lambda x: np.ones((*x.shape[:-1], width)))
    assert not recogniser.accept(wrong)
    assert (node.op, list(node.args)) == before
    assert not recogniser.findings[-1].accepted and "differ" in recogniser.findings[-1].why


def test_a_norm_with_another_eps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, values, _ = trace_twin(twin_config(default_config("llama")))
    real = norms.norm_formula

    def shifted(x: Any, weight: Any, bias: Any, eps: float, **rest: Any) -> Any:
        return real(x, weight, bias, eps * 1.01, **rest)

    monkeypatch.setattr(norms, "norm_formula", shifted)
    recogniser = Recogniser(graph, values)
    norms.match(recogniser)
    assert recogniser.findings and not any(f.accepted for f in recogniser.findings)
