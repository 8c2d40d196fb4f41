"""Float8 products with scales per block, and sparse latent attention over a float8 index.

Where the program carries float8 as float32, quantizing leaves values as they are, with scales of 1:
the graph's function is then seen without the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from maxport.engine.evaluator.call import Call, Unsupported, kernel
from maxport.engine.evaluator.formulas import rms_norm
from maxport.engine.evaluator.kernels.attention import attend
from maxport.engine.evaluator.kernels.mla import expand
from maxport.engine.evaluator.kernels.paged import KEYS, OPERANDS, PagedCache
from maxport.engine.evaluator.kernels.rope import rotate

LARGEST = 448.0
"""Of float8_e4m3fn."""


@kernel("mo.quantize_dynamic_scaled_float8")
def quantize(call: Call, x: torch.Tensor, largest_scale: torch.Tensor) -> Sequence[torch.Tensor]:
    """Values [rows, width] over the scale of their group, and scales [groups, padded rows].

    Args:
        call: The op; `group_size_or_per_token` values of a row share a scale.
        x: [rows, width].
        largest_scale: Upper bound of the largest absolute value that a scale is made from.
    """
    scales = torch.ones(call.shape(1), dtype=torch.float32)
    if call.dtype(0) == torch.float32:
        return [x, scales]
    group = int(call.attribute("group_size_or_per_token"))
    grouped = x.float().unflatten(1, (-1, group))
    amax = grouped.abs().amax(-1).clamp(min=float(call.attribute("amax_floor", 0.0)))
    scale = amax.clamp(max=float(largest_scale)) / LARGEST
    if call.dtype(1) == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scale = torch.where(scale > 0, scale, 1.0).to(call.dtype(1)).float()
    scales[:, : len(x)] = scale.T
    values = (grouped / scale[..., None]).clamp(-LARGEST, LARGEST)
    return [values.flatten(1).to(call.dtype(0)), scales]


def spread(scales: torch.Tensor, shape: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """Scales repeated to `shape`: each along a block of the given sizes; -1 takes a whole axis."""
    for axis, (size, block) in enumerate(zip(shape, blocks, strict=True)):
        if scales.shape[axis] != size:
            each = size if block < 0 else block
            scales = scales.repeat_interleave(each, axis).narrow(axis, 0, size)
    return scales


def _scaled_product(
    call: Call, a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor
) -> torch.Tensor:
    """a [m, k] times b [n, k] transposed, each times its scales, in float32."""
    m, n, k = (int(call.attribute(f"{axis}_scale_granularity")) for axis in "mnk")
    left = a.float() * spread(a_scales.float().T[: len(a)], a.shape, (m, k))
    right = b.float() * spread(b_scales.float(), b.shape, (n, k))
    return left @ right.T


@kernel("mo.matmul_dynamic_scaled_fp8")
def scaled_matmul(
    call: Call, a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor
) -> torch.Tensor:
    """Product of quantized rows and a quantized weight, [n, k]; scales of a are [groups, rows]."""
    return _scaled_product(call, a, b, a_scales, b_scales)


@kernel("mo.grouped.matmul.dynamic.scaled.fp8")
def grouped_scaled_matmul(
    call: Call,
    rows: torch.Tensor,
    weight: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    starts: torch.Tensor,
    experts: torch.Tensor,
    *_: torch.Tensor,
) -> torch.Tensor:
    """The same for each group of rows with its expert's weight, [experts, n, k]."""
    output = torch.zeros(len(rows), weight.shape[1])
    for (first, last), expert in zip(pairwise(starts.tolist()), experts.tolist(), strict=False):
        if last > first and expert >= 0:
            output[first:last] = _scaled_product(
                call, rows[first:last], weight[expert], a_scales[:, first:last], b_scales[expert]
            )
    return output


@kernel("mo.kv_cache.store_k_scales.paged.ragged")
def store_key_scales(call: Call, new: torch.Tensor, *rest: torch.Tensor) -> None:
    """Store the scales of this step's keys, [tokens, heads, groups]."""
    _, _, lengths, _, offsets, _, _, scales, stride, table, layer = rest
    PagedCache.from_operands((scales, stride, lengths, table), layer).store(KEYS, new, offsets)


@kernel("mo.mla.indexer.ragged.float8.paged.remap")
def index_rows(
    call: Call, q: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, *rest: torch.Tensor
) -> Sequence[torch.Tensor]:
    """The k cached tokens of largest score per query: their positions, and rows of the MLA cache.

    A score is the weighted sum over heads of relu(q . key) times the key's scale. Unused places
    hold -1. A row counts tokens through the pages of the MLA cache.

    Args:
        call: The op; `k`, and whether positions are written.
        q: [tokens, heads, head dim].
        weights: [tokens, heads], scales of q included.
        offsets: [batch + 1].
        rest: The index's operands, its scales and their stride and table, layer, the MLA cache's
            blocks and table.
    """
    scales, stride, scales_table, layer, blocks, table = rest[OPERANDS:]
    keys = PagedCache.from_operands(rest[:OPERANDS], layer)
    key_scales = PagedCache.from_operands((scales, stride, rest[2], scales_table), layer)
    causal = str(call.attribute("mask_str")) == "causal"
    count, page = int(call.attribute("k")), blocks.shape[3]
    found = torch.full((len(q), count), -1)
    physical = found.clone()
    for sequence, (first, last) in enumerate(pairwise(offsets.tolist())):
        start = int(keys.lengths[sequence])
        length = start + last - first
        cached = keys.read(KEYS, sequence, length)[:, 0].float()
        cached = cached * key_scales.read(KEYS, sequence, length)[:, 0].float()
        dots = torch.relu(torch.einsum("thd,nd->thn", q[first:last].float(), cached))
        scores = (dots * weights[first:last, :, None].float()).sum(1)
        for token in range(first, last):
            seen = start + token - first + 1 if causal else length
            best = scores[token - first, :seen].topk(min(count, seen)).indices
            found[token, : len(best)] = best
            pages = table[sequence].long()[best // page]
            physical[token, : len(best)] = pages * page + best % page
    return [found if call.attribute("write_logical") else found[:0], physical]


@kernel("mo.mla.graph.decode.paged.fp8.sparse")
def sparse_decode(
    call: Call, q: torch.Tensor, kv: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """Normalise, rotate, store, and attend to chosen rows of the cache; see `mla`.

    Args:
        call: The op; block sizes of the weights' scales.
        q: [tokens, heads, nope + rope dims].
        kv: [tokens, latent + rope dims].
        rest: Offsets, frequencies, norm weight, key projection [heads, latent, nope dims], value
            projection [heads, value dims, latent], the cache's operands, layer, scale, epsilon,
            the projections' scales, launch arguments, rows [tokens, k] (-1 unused), and operands
            that only other variants read.
    """
    offsets, frequencies, gamma, w_uk, w_uv, *tail = rest
    layer, scale, epsilon, uk_scale, uv_scale, _, rows = tail[OPERANDS : OPERANDS + 7]
    if not call.attribute("physical_indices") or call.attribute("has_attn_sink", True):
        raise Unsupported("rows by position, or attention sinks")
    blocks = (1, *(int(call.attribute(f"{axis}_scale_granularity")) for axis in "nk"))
    w_uk = w_uk.float() * spread(uk_scale.float(), w_uk.shape, blocks)
    w_uv = w_uv.float() * spread(uv_scale.float(), w_uv.shape, blocks)
    w_k = w_uk.mT.reshape(-1, w_uk.shape[1])
    cache = PagedCache.from_operands(tail[:OPERANDS], layer)
    _, position = cache.positions(offsets)
    chosen, rope = frequencies[position], frequencies.shape[-1]
    latent = rms_norm(kv[:, :-rope], gamma, float(epsilon))
    key = rotate(kv[:, None, -rope:], chosen, interleaved=True)
    q = rotate(q, chosen, interleaved=True)
    cache.store(KEYS, torch.cat([latent[:, None], key], -1), offsets)
    output = torch.empty(len(q), q.shape[1], w_uv.shape[1], dtype=q.dtype)
    page = cache.page_size
    for token in range(len(q)):
        used = rows[token][rows[token] >= 0].long()
        held = cache.blocks[used // page, KEYS, cache.layer, used % page, 0].to(q.dtype)
        keys, values = expand(held, w_k, w_uv, q.shape[1], rope)
        output[token] = attend(
            q[token][None], keys, values, scale=float(scale), mask=None, start=0
        )[0]
    return output
