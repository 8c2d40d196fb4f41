"""Composite ops: a few graph ops under one name, which MAX fuses into one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maxport.engine.evaluator.call import Call, op
from maxport.engine.evaluator.formulas import layer_norm, product, rms_norm
from maxport.engine.evaluator.kernels.rope import rotate


@op("composite.matmul_add")
def matmul_add(
    call: Call, a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """Matrix product plus a residual."""
    right = b.mT if call.attribute("transpose_b", False) else b
    return product(a, right, call.dtype()) + residual


@op("composite.rope.ragged")
@op("composite.rope.ragged")
def rope_ragged(
    call: Call,
    x: torch.Tensor,
    offsets: torch.Tensor,
    start: torch.Tensor,
    frequencies: torch.Tensor,
) -> torch.Tensor:
    """Rotate [tokens, heads, head dim] at positions that continue each sequence's start."""
    return rotate(
        x,
        frequencies[ragged_positions(offsets, start)],
        interleaved=bool(call.attribute("interleaved")),
        first=bool(call.attribute("rope_first")),
    )


def ragged_positions(offsets: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Position of every token of a ragged batch whose sequences begin at `start`."""
    offsets = offsets.long()
    counts = offsets.diff()
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.arange(len(sequence)) - offsets[sequence] + start.long()[sequence]


@op("composite.layer_norm_rope_ragged")
def layer_norm_rope_ragged(
    call: Call,
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: torch.Tensor,
    offsets: torch.Tensor,
    start: torch.Tensor,
    frequencies: torch.Tensor,
) -> torch.Tensor:
    """LayerNorm, then rotation of the leading dims."""
    normal = layer_norm(x, gamma, beta, float(epsilon.item()))
    chosen = frequencies[ragged_positions(offsets, start)]
    flat = normal.ndim == 2
    heads = normal[:, None] if flat else normal
    turned = rotate(heads, chosen, interleaved=bool(call.attribute("interleaved")), first=True)
    return turned[:, 0] if flat else turned


@op("composite.rms_norm_residual_add")
def rms_norm_residual_add(
    call: Call, x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor
) -> Sequence[torch.Tensor]:
    """RMSNorm of `x + residual`; the sum is the second result."""
    total = x + residual
    return [_attribute_norm(call, total, gamma), total]


@op("composite.rms_norm_rope")
def rms_norm_rope(
    call: Call, x: torch.Tensor, weight: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> torch.Tensor:
    """RMSNorm over the head, then half-split rotation with given cosines and sines."""
    normal = _attribute_norm(call, x, weight)
    first, second = normal.chunk(2, -1)
    return normal * cosine + torch.cat([-second, first], -1) * sine


def _attribute_norm(call: Call, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(
        x,
        weight,
        float(call.attribute("epsilon")),
        weight_offset=float(call.attribute("weight_offset")),
        multiply_before_cast=bool(call.attribute("multiply_before_cast")),
    )
