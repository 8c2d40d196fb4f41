"""Projections that write straight to the cache."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, kernel
from maxport.engine.evaluator.formulas import product
from maxport.engine.evaluator.kernels.paged import KEYS, OPERANDS, VALUES, PagedCache


@kernel("mo.fused_qkv_matmul.ragged.paged", "mo.fused_qkv_matmul.ragged.paged.bias")
def fused_qkv(
    call: Call, x: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """Project to q, k and v with one [q + k + v, in] weight; store k and v, return q."""
    layer, *bias = rest[OPERANDS:]
    cache = PagedCache.from_operands(rest[:OPERANDS], layer)
    y = product(x, weight.T, x.dtype)
    if bias:
        y = y + bias[0]
    heads, width = cache.blocks.shape[4:6]
    kv = heads * width
    q, k, v = y.split([y.shape[1] - 2 * kv, kv, kv], dim=1)
    cache.store(KEYS, k.unflatten(1, (heads, width)), offsets)
    cache.store(VALUES, v.unflatten(1, (heads, width)), offsets)
    return q


@kernel("mo.kv_matmul.ragged.paged")
def kv_matmul(
    call: Call, x: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor
) -> None:
    """Project to k and v and store both."""
    cache = PagedCache.from_operands(rest[:OPERANDS], rest[OPERANDS])
    heads, width = cache.blocks.shape[4:6]
    k, v = product(x, weight.T, x.dtype).chunk(2, dim=1)
    cache.store(KEYS, k.unflatten(1, (heads, width)), offsets)
    cache.store(VALUES, v.unflatten(1, (heads, width)), offsets)


@kernel("mo.k_matmul.ragged.paged")
def k_matmul(
    call: Call, x: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor
) -> None:
    """Project to k and store it."""
    cache = PagedCache.from_operands(rest[:OPERANDS], rest[OPERANDS])
    heads, width = cache.blocks.shape[4:6]
    cache.store(KEYS, product(x, weight.T, x.dtype).unflatten(1, (heads, width)), offsets)
