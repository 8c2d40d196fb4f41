"""Rotary position embedding, alone and fused with the split of QKV and the cache store."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, Unsupported, kernel
from maxport.engine.evaluator.formulas import rms_norm
from maxport.engine.evaluator.kernels.paged import KEYS, VALUES, PagedCache


def rotate(
    x: torch.Tensor, frequencies: torch.Tensor, *, interleaved: bool, first: bool = False
) -> torch.Tensor:
    """Rotate pairs of columns of every head.

    Args:
        x: [tokens, heads, head dim].
        frequencies: [tokens, rotated dims], cosine and sine alternating.
        interleaved: Pairs are neighbours (GPT-J); otherwise they lie half the rotated part apart.
        first: When fewer dims are rotated than a head has, rotate the leading ones.

    Fewer dims, pairs apart and not `first`: MAX pairs column i with column i + half a head, and
    rotates the trailing columns of each half, which is not Hugging Face's partial rotation.
    """
    width, rotated = x.shape[-1], frequencies.shape[-1]
    if not interleaved and rotated != width and not first:
        return _rotate_ends_of_halves(x, frequencies)
    cosine = frequencies[:, None, 0::2].to(torch.promote_types(x.dtype, frequencies.dtype))
    sine = frequencies[:, None, 1::2].to(cosine.dtype)
    keep, part = (
        (x[..., rotated:], x[..., :rotated])
        if first
        else (
            x[..., : width - rotated],
            x[..., width - rotated :],
        )
    )
    part = part.to(cosine.dtype)
    if interleaved:
        real, imaginary = part[..., 0::2], part[..., 1::2]
    else:
        real, imaginary = part.chunk(2, dim=-1)
    turned = (real * cosine - imaginary * sine, imaginary * cosine + real * sine)
    result = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    pieces = (result.to(x.dtype), keep) if first else (keep, result.to(x.dtype))
    return torch.cat(pieces, -1) if keep.shape[-1] else result.to(x.dtype)


def _rotate_ends_of_halves(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    half, pairs = x.shape[-1] // 2, frequencies.shape[-1] // 2
    columns = torch.arange(half - pairs, half)
    ends = torch.cat([columns, columns + half])
    result = x.clone()
    result[..., ends] = rotate(x[..., ends], frequencies, interleaved=False)
    return result


def head_wide_rows(table: torch.Tensor, position: torch.Tensor, width: int) -> torch.Tensor:
    """A token's frequencies as the fused kernels read them: `width` numbers from position * width.

    The kernels take the table's rows to be a head wide. In a table of another width (MAX's Llama
    V2 makes one when head_dim is not hidden_size / heads) they so read other positions' rows, as
    the compiled kernel does.

    Raises:
        Unsupported: They read past the table's end, where anything may be.
    """
    if table.shape[1] == width:
        return table[position]
    rows = table.reshape(-1)[: table.numel() // width * width].view(-1, width)
    if len(position) and int(position.max()) >= len(rows):
        raise Unsupported(f"a rope table {table.shape[1]} wide for heads of {width}, past its end")
    return rows[position]


@kernel("mo.rope_split_store.ragged.paged")
def rope_split_store(call: Call, qkv: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Split [tokens, q + k + v], rotate q and k, store k and v, return q."""
    offsets, frequencies, *operands, layer = rest
    cache = PagedCache.from_operands(operands, layer)
    _, position = cache.positions(offsets)
    chosen = head_wide_rows(frequencies, position, cache.blocks.shape[5])
    return split_rotate_store(call, qkv, chosen, cache, offsets)


@kernel("mo.rope_split_store.ragged.paged.with_position_id")
def rope_split_store_at(call: Call, qkv: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """As above at given positions, [sections, tokens]; sections share the head's dims (mRoPE)."""
    offsets, frequencies, *operands, positions, layer = rest
    cache = PagedCache.from_operands(operands, layer)
    chosen = sectioned(frequencies, positions, str(call.attribute("mrope_section", "")))
    return split_rotate_store(call, qkv, chosen, cache, offsets)


@kernel("mo.rope_split_store.ragged.paged.with_qk_norm")
def norm_rope_split_store(call: Call, qkv: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Per-head RMSNorm of q and k by their weights and of v without one, then as above.

    With `k_eq_v` there is no v part; values are made from the keys' projection.
    """
    offsets, frequencies, q_gamma, k_gamma, *operands, layer = rest
    cache = PagedCache.from_operands(operands, layer)
    heads, width = cache.blocks.shape[4:6]
    kv = heads * width
    shared = bool(call.attribute("k_eq_v"))
    q, k, *v = qkv.split([qkv.shape[1] - (1 if shared else 2) * kv, kv, *[kv] * (not shared)], 1)
    epsilon = 1.0 / int(call.attribute("eps_recip"))
    value = (v[0] if v else k).unflatten(1, (heads, width))
    _, position = cache.positions(offsets)
    chosen, interleaved = frequencies[position], bool(call.attribute("interleaved"))
    turned = [
        rotate(
            rms_norm(x.unflatten(1, (-1, width)), gamma, epsilon), chosen, interleaved=interleaved
        )
        for x, gamma in ((q, q_gamma), (k, k_gamma))
    ]
    cache.store(KEYS, turned[1], offsets)
    cache.store(VALUES, rms_norm(value, None, epsilon), offsets)
    return turned[0].flatten(1)


def sectioned(frequencies: torch.Tensor, positions: torch.Tensor, ends: str) -> torch.Tensor:
    """Frequencies of every token; column blocks ending at `ends` take successive position rows."""
    by_row = frequencies[positions.long()]  # [sections, tokens, rotated dims]
    if not ends:
        return by_row[0]
    pieces, start = [], 0
    for row, end in enumerate(int(end) for end in ends.split("_")):
        pieces.append(by_row[row, :, start:end])
        start = end
    return torch.cat(pieces, -1)


def split_rotate_store(
    call: Call,
    qkv: torch.Tensor,
    frequencies: torch.Tensor,
    cache: PagedCache,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Shared tail of the fused kernels; `frequencies` is per token."""
    heads, width = cache.blocks.shape[4:6]
    kv = heads * width
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv, kv, kv], dim=1)
    interleaved = bool(call.attribute("interleaved", True))
    q = rotate(q.unflatten(1, (-1, width)), frequencies, interleaved=interleaved)
    k = rotate(k.unflatten(1, (heads, width)), frequencies, interleaved=interleaved)
    cache.store(KEYS, k, offsets)
    cache.store(VALUES, v.unflatten(1, (heads, width)), offsets)
    return q.flatten(1)
