"""Multi-head latent attention: the cache holds one latent row per token, shared by all heads.

A row is [latent, rotated key part]. The kernels normalise the latent, rotate the last dims of query
and key (neighbouring pairs), store the row, and attend with keys and values made from the latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from maxport.engine.evaluator.call import Call, kernel
from maxport.engine.evaluator.formulas import rms_norm
from maxport.engine.evaluator.kernels.attention import attend, mask_of
from maxport.engine.evaluator.kernels.paged import KEYS, OPERANDS, PagedCache
from maxport.engine.evaluator.kernels.rope import rotate


@kernel("mo.mla.prefill.ragged.plan")
def plan(call: Call, offsets: torch.Tensor, *rest: torch.Tensor) -> Sequence[torch.Tensor]:
    """Chunks of the cache to decompress; here everything is one chunk, as MAX's callers take it.

    Gives, per chunk, where each sequence starts in the buffer and in the cache, and the total.
    """
    *operands, layer, _ = rest
    cache = PagedCache.from_operands(operands, layer)
    totals = cache.lengths + offsets.long().diff()
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), totals.cumsum(0)])
    starts, zeros = torch.zeros(call.shape(0)), torch.zeros(call.shape(1))
    starts[0] = ends
    lengths = torch.zeros(call.shape(2))
    lengths[0] = ends[-1]
    return [starts, zeros, lengths]


@kernel("mo.mla.graph.prefill.decode.paged")
def prefill_decode(
    call: Call, q: torch.Tensor, kv: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """Normalise, rotate, store and attend; prefill and decode are the same computation here."""
    offsets, frequencies, gamma, _, _, _, w_k, _, w_uv, *tail = rest
    return _latent_attention(call, q, kv, offsets, frequencies, gamma, w_k, w_uv, tail)


@kernel("mo.mla.graph.prefill.paged")
def prefill(call: Call, q: torch.Tensor, kv: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """The same with the key projection as [heads * nope dims, latent]."""
    offsets, frequencies, gamma, _, _, _, w_k, w_uv, *tail = rest
    return _latent_attention(call, q, kv, offsets, frequencies, gamma, w_k, w_uv, tail)


@kernel("mo.mla.graph.decode.paged")
def decode(call: Call, q: torch.Tensor, kv: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """The same with the key projection as [heads, latent, nope dims]."""
    offsets, frequencies, gamma, w_uk, w_uv, *tail = rest
    w_k = w_uk.mT.reshape(-1, w_uk.shape[1])
    return _latent_attention(call, q, kv, offsets, frequencies, gamma, w_k, w_uv, tail)


def _latent_attention(
    call: Call,
    q: torch.Tensor,
    kv: torch.Tensor,
    offsets: torch.Tensor,
    frequencies: torch.Tensor,
    gamma: torch.Tensor,
    w_k: torch.Tensor,
    w_uv: torch.Tensor,
    tail: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Shared body.

    Args:
        call: The op.
        q: [tokens, heads, nope + rope dims].
        kv: [tokens, latent + rope dims].
        offsets: [batch + 1].
        frequencies: [positions, rope dims].
        gamma: [latent], RMSNorm weight.
        w_k: [heads * nope dims, latent].
        w_uv: [heads, value dims, latent].
        tail: The cache operands, layer, scale, epsilon, and what only steers the launch.
    """
    layer, scale, epsilon = tail[OPERANDS : OPERANDS + 3]
    cache = PagedCache.from_operands(tail[:OPERANDS], layer)
    _, position = cache.positions(offsets)
    chosen = frequencies[position]
    rope = frequencies.shape[-1]
    latent = rms_norm(kv[:, :-rope], gamma, float(epsilon))
    key = rotate(kv[:, None, -rope:], chosen, interleaved=True)
    q = rotate(q, chosen, interleaved=True)
    cache.store(KEYS, torch.cat([latent[:, None], key], -1), offsets)
    heads = q.shape[1]
    output = torch.empty(len(q), heads, w_uv.shape[1], dtype=q.dtype)
    mask = mask_of(str(call.attribute("mask_str")), int(call.attribute("local_window_size", -1)))
    for sequence, (first, last) in enumerate(pairwise(offsets.tolist())):
        start = int(cache.lengths[sequence])
        rows = cache.read(KEYS, sequence, start + last - first)[:, 0].to(q.dtype)
        keys, values = expand(rows, w_k, w_uv, heads, rope)
        output[first:last] = attend(
            q[first:last], keys, values, scale=float(scale), mask=mask, start=start
        )
    return output


def expand(
    rows: torch.Tensor, w_k: torch.Tensor, w_uv: torch.Tensor, heads: int, rope: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all heads from cached rows [length, latent + rope dims]."""
    latent, rotated = rows[:, :-rope], rows[:, -rope:]
    nope = (latent @ w_k.T.to(rows.dtype)).unflatten(1, (heads, -1))
    keys = torch.cat([nope, rotated[:, None].expand(-1, heads, -1)], -1)
    return keys, torch.einsum("tl,hvl->thv", latent, w_uv.to(rows.dtype))


@kernel("mo.mla.decompress.k.cache.ragged.paged")
def decompress(
    call: Call,
    buffer_offsets: torch.Tensor,
    cache_offsets: torch.Tensor,
    length: torch.Tensor,
    weight: torch.Tensor,
    *rest: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """Copy the sequences' latents one after another and project them; rows past the end are 0."""
    *operands, layer = rest
    cache = PagedCache.from_operands(operands, layer)
    latents = torch.zeros(call.shape(0), dtype=call.dtype(0))
    keys = torch.zeros(call.shape(1), dtype=call.dtype(1))
    ends = buffer_offsets.tolist()
    for sequence, (first, last) in enumerate(pairwise(ends)):
        begin = int(cache_offsets[sequence])
        rows = cache.read(KEYS, sequence, begin + last - first)[begin:, 0]
        latents[first:last] = rows[:, : latents.shape[1]]
    total = int(length.reshape(-1)[0])
    keys[:total] = latents[:total] @ weight.T
    return [latents, keys]


@kernel("mo.mla.decode.ragged.paged")
def decode_ragged(call: Call, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Queries already projected to the latent space against cached rows; values are the latents."""
    offsets, *tail = rest
    layer, scale = tail[OPERANDS : OPERANDS + 2]
    cache = PagedCache.from_operands(tail[:OPERANDS], layer)
    width = call.shape()[-1]
    output = torch.empty(len(q), q.shape[1], width, dtype=call.dtype())
    mask = mask_of(str(call.attribute("mask_str")), -1)
    for sequence, (first, last) in enumerate(pairwise(offsets.tolist())):
        start = int(cache.lengths[sequence])
        rows = cache.read(KEYS, sequence, start + last - first)
        output[first:last] = attend(
            q[first:last], rows, rows[..., :width], scale=float(scale), mask=mask, start=start
        )
    return output


@kernel("mo.mla.prefill.ragged.paged")
def prefill_ragged(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """Queries against decompressed keys and values plus the rotated part from the cache."""
    buffer_offsets, _, offsets, *tail = rest
    layer, scale = tail[OPERANDS : OPERANDS + 2]
    cache = PagedCache.from_operands(tail[:OPERANDS], layer)
    width = call.shape()[-1]
    rope = q.shape[-1] - width
    output = torch.empty(len(q), q.shape[1], width, dtype=call.dtype())
    mask = mask_of(str(call.attribute("mask_str")), -1)
    bounds = zip(pairwise(offsets.tolist()), pairwise(buffer_offsets.tolist()), strict=True)
    for sequence, ((first, last), (begin, end)) in enumerate(bounds):
        start = int(cache.lengths[sequence])
        rotated = cache.read(KEYS, sequence, end - begin)[..., -rope:].to(k.dtype)
        heads = k[begin:end].reshape(end - begin, q.shape[1], -1)
        keys = torch.cat([heads, rotated.expand(-1, q.shape[1], -1)], -1)
        values = v[begin:end].reshape(end - begin, q.shape[1], -1)
        output[first:last] = attend(
            q[first:last], keys, values, scale=float(scale), mask=mask, start=start
        )
    return output
