"""Small kernels: argsort, repeat, ragged merges, scatter that skips, plain ragged rotation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from maxport.engine.evaluator.call import Call, kernel
from maxport.engine.evaluator.formulas import rms_norm
from maxport.engine.evaluator.kernels.rope import rotate


@kernel("mx.argsort")
def argsort(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Sorting indices of a vector; equal values keep their order."""
    ascending = bool(call.attribute("ascending", True))
    return torch.argsort(x, descending=not ascending, stable=True)


@kernel("repeat_interleave")
def repeat_interleave(
    call: Call, x: torch.Tensor, repeats: torch.Tensor, axis: torch.Tensor
) -> torch.Tensor:
    """Repeat each element along an axis."""
    counts = repeats.long()
    along = int(axis.item())
    if counts.numel() == 1:
        counts = counts.reshape(-1).expand(x.shape[along])
    return torch.repeat_interleave(x, counts, dim=along)


@kernel("mo.rope.ragged.with_position_id")
def rope_at(
    call: Call,
    x: torch.Tensor,
    offsets: torch.Tensor,
    start: torch.Tensor,
    frequencies: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Rotate [tokens, heads, head dim] at given positions, [1, tokens]."""
    chosen = frequencies[positions.reshape(-1).long()]
    return rotate(x, chosen, interleaved=bool(call.attribute("interleaved")))


@kernel("rms_norm_fused_residual")
def norm_of_sum(
    call: Call,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: torch.Tensor,
    offset: torch.Tensor,
    *dropout: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """RMSNorm of `x + residual`, and the sum."""
    total = x + residual
    normal = rms_norm(
        total,
        weight,
        float(epsilon),
        weight_offset=float(offset),
        multiply_before_cast=bool(call.attribute("multiply_before_cast")),
    )
    return [normal, total]


@kernel("mo.scatter_nd.skip_neg_indices")
def scatter_skipping(
    call: Call, x: torch.Tensor, updates: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """Write rows at indices; rows whose index is out of range are left out."""
    rows = index.flatten(1).long() if index.ndim > 1 else index[:, None].long()
    sizes = torch.tensor(x.shape[: rows.shape[1]])
    kept = ((rows >= 0) & (rows < sizes)).all(1)
    result = x.clone()
    result[tuple(rows[kept].T)] = updates[kept]
    return result


@kernel("mo.merge_ragged_tensors")
def merge_ragged(
    call: Call,
    a: torch.Tensor,
    a_offsets: torch.Tensor,
    b: torch.Tensor,
    b_offsets: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """Append each sequence of b to the same sequence of a."""
    pieces: list[torch.Tensor] = []
    for (a0, a1), (b0, b1) in zip(
        pairwise(a_offsets.tolist()), pairwise(b_offsets.tolist()), strict=True
    ):
        pieces += [a[a0:a1], b[b0:b1]]
    return [torch.cat(pieces), a_offsets + b_offsets]
