"""Attention over a window and compressed entries (DeepSeek V4), and its gates for residual streams.

Every `ratio` tokens close a window, which is pooled into one entry. Entries live in leaves of the
paged cache whose pages have a slot per entry; the projections that open windows still need live in
a state leaf with a slot per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from maxport.engine.evaluator.call import Call, kernel
from maxport.engine.evaluator.formulas import rms_norm
from maxport.engine.evaluator.kernels.attention import attend
from maxport.engine.evaluator.kernels.paged import KEYS, OPERANDS, VALUES, PagedCache
from maxport.engine.evaluator.kernels.rope import rotate

FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def snap_to_fp8(x: torch.Tensor, block: int = 64) -> torch.Tensor:
    """Round the last axis to float8_e4m3fn with a power-of-two scale per `block` values."""
    grouped, scale = _scaled(x, block, 448.0, 1e-4)
    return ((grouped / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).reshape(
        x.shape
    )


def snap_to_fp4(x: torch.Tensor, block: int = 32) -> torch.Tensor:
    """Round the last axis to float4_e2m1fn, ties to even, with a scale as above."""
    grouped, scale = _scaled(x, block, 6.0, 6.0 * 2.0**-126)
    grid = torch.tensor(FP4_MAGNITUDES)
    middles = (grid[1:] + grid[:-1]) / 2
    size = (grouped / scale).abs().clamp(max=6)
    above = torch.bucketize(size, middles, right=False)
    tie = (size == middles[above.clamp(max=len(middles) - 1)]) & (above % 2 == 1)
    snapped = grid[above + tie.long()] * torch.sign(grouped)
    return (snapped * scale).reshape(x.shape)


def _scaled(
    x: torch.Tensor, block: int, largest: float, floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = x.float().unflatten(-1, (-1, block))
    amax = grouped.abs().amax(-1, keepdim=True).clamp(min=floor)
    mantissa, exponent = torch.frexp(amax / largest)
    exponent = exponent - (mantissa == 0.5).int()  # a power of two is its own ceiling
    return grouped, torch.ldexp(torch.ones_like(amax), exponent)


def hadamard(width: int) -> torch.Tensor:
    """The orthonormal Sylvester Hadamard matrix; `width` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * width**-0.5


@kernel("mo.compress_windows.ragged.paged")
def compress_windows(
    call: Call, kv: torch.Tensor, score: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """One entry per window that a sequence's new tokens touch, whether it closes or not.

    An entry is the softmax of score + ape over the window's positions (per channel) times kv; where
    ape is twice an entry wide, the window before takes part with its low half. Then RMSNorm, rotary
    at the window's first position, and rounding to float8, or Hadamard rotation and float4.

    Args:
        call: The op; `rotate` chooses the last step.
        kv: [tokens, width], float32.
        score: [tokens, width], float32.
        rest: ape [ratio, width], norm weight [entry], frequencies [positions, rope / 2, 2], row
            offsets, window offsets, starts [batch], the state leaf's operands, layer, epsilon.
    """
    ape, weight, frequencies, offsets, window_offsets, starts, *tail = rest
    layer, epsilon = tail[OPERANDS:]
    state = PagedCache.from_operands(tail[:OPERANDS], layer)
    ratio, width = len(ape), len(weight)
    output = torch.zeros(call.shape(), dtype=call.dtype())
    for sequence, (first, last) in enumerate(pairwise(offsets.tolist())):
        start = int(starts[sequence])
        known = [
            torch.cat([state.read(which, sequence, start)[:, 0].float(), new[first:last]])
            for which, new in ((KEYS, kv), (VALUES, score))
        ]
        begin = start - start % ratio
        for number, row in enumerate(range(*window_offsets[sequence : sequence + 2].tolist())):
            at = begin + number * ratio
            pooled = _pooled(known[0], known[1], ape, at, width)
            entry = rms_norm(pooled.to(weight.dtype)[None], weight, float(epsilon))
            entry = rotate(entry[None], frequencies[at].reshape(1, -1), interleaved=True)[0, 0]
            output[row] = _rounded(entry, 2 * frequencies.shape[1], call.attribute("rotate"))
    return output


def _pooled(
    kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, at: int, width: int
) -> torch.Tensor:
    """The pooled window that begins at position `at`; rows are positions from 0."""
    ratio = len(ape)
    parts = [(at, ape.shape[1] - width, ape.shape[1])]
    if ape.shape[1] == 2 * width:
        parts.insert(0, (at - ratio, 0, width))
    values, gates = [], []
    for begin, low, high in parts:
        rows = torch.arange(max(begin, 0), min(begin + ratio, len(kv)))
        values.append(kv[rows, low:high])
        gates.append(score[rows, low:high] + ape[rows - begin, low:high])
    return (torch.cat(values) * torch.softmax(torch.cat(gates), 0)).sum(0)


def _rounded(entry: torch.Tensor, rope: int, turned: bool) -> torch.Tensor:
    if turned:
        return snap_to_fp4(entry.float() @ hadamard(len(entry)))
    return torch.cat([snap_to_fp8(entry[:-rope]), entry[-rope:].float()])


@kernel("mo.indexer_score.ragged.paged")
def indexer_score(
    call: Call,
    q: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    base: torch.Tensor,
    cutoff: torch.Tensor,
    *rest: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum over heads of relu(q . entry); columns without a live entry are 0.

    The first half of the columns are entries from before this step, below `base`; the second half
    those that it adds, below `cutoff` of the token.

    Args:
        call: The op.
        q: [tokens, heads, head dim].
        weights: [tokens, heads].
        offsets: [batch + 1].
        base: [batch] entries from before.
        cutoff: [tokens] entries that a token may see.
        rest: The entry leaf's operands and the layer.
    """
    leaf = PagedCache.from_operands(rest[:OPERANDS], rest[OPERANDS])
    scores = torch.zeros(call.shape(), dtype=torch.float32)
    half = scores.shape[1] // 2
    for sequence, (first, last) in enumerate(pairwise(offsets.tolist())):
        old = int(base[sequence])
        entries = leaf.read(KEYS, sequence, max(int(cutoff[first:last].max()), old))[:, 0]
        dots = torch.relu(torch.einsum("thd,nd->thn", q[first:last].float(), entries.float()))
        found = (dots * weights[first:last, :, None]).sum(1)
        scores[first:last, :old] = found[:, :old]
        fresh = found[:, old:]
        live = torch.arange(old, old + fresh.shape[1]) < cutoff[first:last, None]
        scores[first:last, half : half + fresh.shape[1]] = fresh * live
    return scores


@kernel("mo.top_k.per_row")
def top_k_per_row(call: Call, x: torch.Tensor, counts: torch.Tensor) -> Sequence[torch.Tensor]:
    """The first `counts[row]` of the best `max_k`; the others are the lowest value, index -1."""
    best, index = x.topk(int(call.attribute("max_k")), -1)
    unused = torch.arange(best.shape[1]) >= counts[:, None]
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    return [best.masked_fill(unused, lowest), index.masked_fill(unused, -1)]


@kernel("mo.latent_sparse_attention.ragged.paged")
def latent_sparse_attention(
    call: Call,
    q: torch.Tensor,
    offsets: torch.Tensor,
    chosen: torch.Tensor,
    sinks: torch.Tensor,
    *rest: torch.Tensor,
) -> torch.Tensor:
    """Every head attends to the rows of its token's window and to the chosen entries, key = value.

    Args:
        call: The op; `window` counts the token itself.
        q: [tokens, heads, head dim].
        offsets: [batch + 1].
        chosen: [tokens, entries]; -1 where unused.
        sinks: [heads] logits in the softmax's denominator.
        rest: Operands of the window's leaf and of the entries' leaf, their layers, the scale.
    """
    near, far = rest[:OPERANDS], rest[OPERANDS : 2 * OPERANDS]
    near_layer, far_layer, scale = rest[2 * OPERANDS :]
    window = PagedCache.from_operands(near, near_layer)
    leaf = PagedCache.from_operands(far, far_layer)
    sequence, position = window.positions(offsets)
    output = torch.empty_like(q)
    for token in range(len(q)):
        owner, at = int(sequence[token]), int(position[token])
        begin = max(0, at - int(call.attribute("window")) + 1)
        used = chosen[token][chosen[token] >= 0].long()
        entries = leaf.read(KEYS, owner, int(used.max()) + 1 if len(used) else 0)[used]
        rows = torch.cat([window.read(KEYS, owner, at + 1)[begin:], entries])
        output[token] = attend(
            q[token][None], rows, rows, scale=float(scale), mask=None, start=at, sinks=sinks
        )[0]
    return output


@kernel("mo.hyper_connection.gates")
def hyper_connection_gates(
    call: Call,
    projected: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    epsilon: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """How residual streams collapse (pre), where a sublayer's result goes (post), how they mix.

    The mixer is a softmax made doubly stochastic by alternately dividing columns and rows by their
    sums (Sinkhorn).

    Args:
        call: The op; `hc_mult` streams, `hc_sinkhorn_iters` column divisions.
        projected: [tokens, 2 * streams + streams^2]: pre, post, mixer.
        bias: The same width.
        scale: [3].
        epsilon: Added to pre, to the softmax and to each sum.
    """
    streams, eps = int(call.attribute("hc_mult")), float(epsilon)
    sizes = [streams, streams, streams * streams]
    pre, post, mix = (
        part * factor + offset
        for part, factor, offset in zip(
            projected.split(sizes, 1), scale, bias.split(sizes), strict=True
        )
    )
    mixer = torch.softmax(mix.unflatten(1, (streams, streams)), -1) + eps
    mixer = mixer / (mixer.sum(-2, keepdim=True) + eps)
    for _ in range(int(call.attribute("hc_sinkhorn_iters")) - 1):
        mixer = mixer / (mixer.sum(-1, keepdim=True) + eps)
        mixer = mixer / (mixer.sum(-2, keepdim=True) + eps)
    return [torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), mixer.flatten(1)]
