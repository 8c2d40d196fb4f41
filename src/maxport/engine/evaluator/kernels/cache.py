"""Kernels that write to, or read from, the paged cache and do nothing else."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, kernel
from maxport.engine.evaluator.kernels.paged import PagedCache


@kernel("mo.kv_cache.store.paged.ragged")
def store_ragged(call: Call, new: torch.Tensor, *rest: torch.Tensor) -> None:
    """Store keys (`key_or_value` 0) or values (1) of a ragged batch."""
    blocks, stride, lengths, table, offsets, _, _, layer = rest
    cache = PagedCache.from_operands((blocks, stride, lengths, table), layer)
    cache.store(int(call.attribute("key_or_value")), new, offsets)
