"""Attention over the paged cache, with every mask, attention sinks and relative-position logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from maxport.engine.evaluator.call import Call, Unsupported, kernel
from maxport.engine.evaluator.kernels.paged import KEYS, VALUES, PagedCache

Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mask_of(name: str, window: int) -> Mask | None:
    """Which keys a query sees, as a function of both positions; None when it sees all.

    Raises:
        Unsupported: MAX has gained a mask that is not known here.
    """
    masks: dict[str, Mask | None] = {
        "null": None,
        "causal": lambda q, k: k <= q,
        "sliding_window_causal": lambda q, k: (k <= q) & (q - k < window),
        "sliding_window_noncausal": lambda q, k: q - k < window,
        "chunked_causal": lambda q, k: (k <= q) & (q // window == k // window),
    }
    if name not in masks:
        raise Unsupported(f"the mask {name}")
    return masks[name]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: Mask | None,
    start: int,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one sequence, computed in float32 (float64 stays), in q's dtype.

    Args:
        q: [queries, heads, head dim].
        k: [keys, kv heads, head dim].
        v: [keys, kv heads, value dim].
        scale: Multiplies the scores.
        mask: From `mask_of`.
        start: Position of the first query; keys start at 0.
        sinks: [heads], a logit per head that takes part in the softmax and carries no value.
        bias: [heads, queries, keys], added to the scaled scores.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = q.to(wide).transpose(0, 1).reshape(kv_heads, -1, q.shape[-1])
    scores = (grouped @ k.to(wide).permute(1, 2, 0)).reshape(heads, len(q), len(k)) * scale
    if bias is not None:
        scores = scores + bias.to(wide)
    if mask is not None:
        rows = torch.arange(start, start + len(q))[:, None]
        scores = scores.masked_fill(~mask(rows, torch.arange(len(k))[None]), -torch.inf)
    if sinks is not None:
        column = sinks.to(wide)[:, None, None].expand(heads, len(q), 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    mixed = weights.reshape(kv_heads, -1, len(k)) @ v.to(wide).transpose(0, 1)
    return mixed.reshape(heads, len(q), -1).transpose(0, 1).to(q.dtype)


@kernel("mo.mha.ragged.paged")
def mha(call: Call, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Ragged queries against their own cached keys and values."""
    offsets, *operands, layer, scale, _ = rest
    return _over_sequences(call, q, offsets, PagedCache.from_operands(operands, layer), scale)


@kernel("mo.mha.ragged.paged.sink_weights")
def mha_sinks(call: Call, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """With one sink logit per head."""
    offsets, *operands, layer, scale, sinks, _ = rest
    cache = PagedCache.from_operands(operands, layer)
    return _over_sequences(call, q, offsets, cache, scale, sinks=sinks)


@kernel("mo.mha.ragged.paged.rel_logits")
def mha_relative(call: Call, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """With a bias per token, head and distance, [tokens, heads, extent]; none beyond the extent."""
    offsets, *operands, layer, scale, table, _ = rest
    cache = PagedCache.from_operands(operands, layer)
    return _over_sequences(call, q, offsets, cache, scale, relative=table)


def _over_sequences(
    call: Call,
    q: torch.Tensor,
    offsets: torch.Tensor,
    cache: PagedCache,
    scale: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    relative: torch.Tensor | None = None,
) -> torch.Tensor:
    window = int(call.attribute("local_window_size", -1))
    name = call.attribute("mask_str", "causal" if window < 0 else "sliding_window_causal")
    mask = mask_of(str(name), window)
    output = torch.empty_like(q)
    ends = offsets.tolist()
    for sequence, (first, last) in enumerate(pairwise(ends)):
        if first == last:
            continue
        start = int(cache.lengths[sequence])
        length = start + last - first
        bias = None if relative is None else _by_distance(relative[first:last], start, length)
        output[first:last] = attend(
            q[first:last],
            cache.read(KEYS, sequence, length),
            cache.read(VALUES, sequence, length),
            scale=float(scale),
            mask=mask,
            start=start,
            sinks=sinks,
            bias=bias,
        )
    return output


def _by_distance(table: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """[queries, heads, extent] looked up at query minus key position: [heads, queries, keys]."""
    queries, heads, extent = table.shape
    distance = torch.arange(start, start + queries)[:, None] - torch.arange(length)[None]
    inside = (distance >= 0) & (distance < extent)
    index = distance.clamp(0, extent - 1)[:, None, :].expand(queries, heads, length)
    return torch.where(inside[:, None], table.gather(2, index), 0).transpose(0, 1)
