"""Kernels that write to, or read from, the paged cache and do nothing else."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, kernel
from maxport.engine.evaluator.kernels.paged import OPERANDS, PagedCache


@kernel("mo.kv_cache.store.paged.ragged")
def store_ragged(call: Call, new: torch.Tensor, *rest: torch.Tensor) -> None:
    """Store keys (`key_or_value` 0) or values (1) of a ragged batch."""
    blocks, stride, lengths, table, offsets, _, _, layer = rest
    cache = PagedCache.from_operands((blocks, stride, lengths, table), layer)
    cache.store(int(call.attribute("key_or_value")), new, offsets)


@kernel("mo.kv_cache.store.paged.padded")
def store_padded(call: Call, new: torch.Tensor, *rest: torch.Tensor) -> None:
    """Store the valid tokens of [batch, length, heads, head dim]."""
    blocks, stride, lengths, table, valid, _, _, layer = rest
    cache = PagedCache.from_operands((blocks, stride, lengths, table), layer)
    counts = valid.long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    flat = torch.cat([row[:count] for row, count in zip(new, counts.tolist(), strict=True)])
    cache.store(int(call.attribute("key_or_value")), flat, offsets)


@kernel("mo.kv_cache.ragged.paged.radd")
def add_to_cache(call: Call, added: torch.Tensor, *rest: torch.Tensor) -> None:
    """Add [tokens, keys + values] to this step's cached rows of the last sequences (LoRA)."""
    offsets, batch_offset, layer = rest[OPERANDS:]
    first = int(batch_offset)
    whole = PagedCache.from_operands(rest[:OPERANDS], layer)
    cache = PagedCache(whole.blocks, whole.lengths[first:], whole.table[first:], whole.layer)
    offsets = offsets - offsets[0]
    for which, part in enumerate(added.chunk(2, dim=1)):
        new = cache.new(which, offsets)
        cache.store(which, new + part.reshape(new.shape), offsets)
