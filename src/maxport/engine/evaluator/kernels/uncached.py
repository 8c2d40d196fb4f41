"""Attention over given keys and values, without a cache: encoders and vision towers."""

from __future__ import annotations

from itertools import pairwise

import torch

from maxport.engine.evaluator.call import Call, kernel, op
from maxport.engine.evaluator.kernels.attention import Mask, attend, mask_of


def _mask(call: Call) -> Mask | None:
    return mask_of(str(call.attribute("mask_str")), int(call.attribute("local_window_size", -1)))


@kernel("mo.mha.no_cache")
def dense(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """[batch, length, heads, head dim], every row a text of full length."""
    mask = _mask(call)
    rows = [
        attend(*row, scale=float(scale), mask=mask, start=0) for row in zip(q, k, v, strict=True)
    ]
    return torch.stack(rows)


@kernel("mo.mha.padded.no_cache")
def padded(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    valid: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """As above, row b counting up to `valid[b]`; MAX leaves the rest undefined, here it is 0."""
    mask, output = _mask(call), torch.zeros_like(q)
    for row, length in enumerate(valid.tolist()):
        if length:
            parts = (x[row, :length] for x in (q, k, v))
            output[row, :length] = attend(*parts, scale=float(scale), mask=mask, start=0)
    return output


@kernel("mo.mha.ragged.no_cache")
def ragged(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    longest: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """[tokens, heads, head dim], texts one after another."""
    mask, output = _mask(call), torch.empty_like(q)
    for first, last in pairwise(offsets.tolist()):
        if last > first:
            parts = (x[first:last] for x in (q, k, v))
            output[first:last] = attend(*parts, scale=float(scale), mask=mask, start=0)
    return output


@op("composite.masked_flash_attention_gpu", "composite.masked_flash_attention_cpu")
def with_mask_tensor(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """An additive mask, [batch, queries, keys] or [batch, heads, queries, keys]."""
    bias = mask[:, None] if mask.ndim == 3 else mask
    rows = [
        attend(*row, scale=float(scale), mask=None, start=0, bias=added)
        for *row, added in zip(q, k, v, bias, strict=True)
    ]
    return torch.stack(rows)
