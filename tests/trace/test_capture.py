"""Tracing: what the export keeps, and masks told apart by their pattern."""

from __future__ import annotations

import pytest
import torch

from maxport.errors import MaxportError
from maxport.ir import TOKENS
from maxport.trace.capture import classify_mask
from maxport.trace.study import trace_twin
from maxport.twin import default_config, twin_config

N = 12
ROW, COL = torch.arange(N)[:, None], torch.arange(N)[None]


@pytest.mark.parametrize(
    ("visible", "kind"),
    [
        (torch.ones(N, N, dtype=torch.bool), ("bidirectional", 0)),
        (COL <= ROW, ("causal", 0)),
        ((COL <= ROW) & (ROW - COL < 5), ("sliding", 5)),
        ((COL <= ROW) & (ROW // 4 == COL // 4), ("chunked", 4)),
    ],
)
def test_masks_are_named_by_their_pattern(visible: torch.Tensor, kind: tuple[str, int]) -> None:
    assert classify_mask(visible) == kind


def test_a_mask_of_no_known_pattern_is_refused() -> None:
    with pytest.raises(MaxportError, match="neither causal"):
        classify_mask((COL <= ROW) & ((ROW + COL) % 3 != 0))


def test_a_traced_llama_has_its_modules_shapes_and_lines() -> None:
    graph, _, _ = trace_twin(twin_config(default_config("llama")))
    attention = [n for n in graph.nodes if n.op == "attention"]
    assert [n.scope for n in attention] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(n.shape[1] == TOKENS and n.line.startswith("modeling_llama.py:") for n in attention)
    assert not any(n.op in ("dropout", "clone", "_assert_tensor_metadata") for n in graph.nodes)
    text = str(graph)
    assert "rsqrt" in text and "modeling_llama.py" in text


def test_values_of_a_traced_part_are_those_of_torch() -> None:
    graph, values, model = trace_twin(twin_config(default_config("llama")))
    linear = next(n for n in graph.nodes if n.op == "linear")
    rng = torch.Generator().manual_seed(1)
    width = model.model.layers[0].self_attn.q_proj.weight.shape[1]
    x = torch.randn(values.batch, 13, width, generator=rng, dtype=torch.float64)
    got = values.run(linear.name, {linear.args[0].name: x.numpy()})
    want = x @ model.model.layers[0].self_attn.q_proj.weight.detach().double().T
    assert abs(got - want.numpy()).max() < 1e-12
