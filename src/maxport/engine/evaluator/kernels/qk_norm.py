"""Norms of queries and of freshly cached keys and values, alone and fused with the rotation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maxport.engine.evaluator.call import Call, kernel
from maxport.engine.evaluator.formulas import rms_norm
from maxport.engine.evaluator.kernels.paged import KEYS, OPERANDS, VALUES, PagedCache
from maxport.engine.evaluator.kernels.rope import rotate, sectioned


@kernel("mo.rms_norm_kv_cache.ragged.paged", "mo.rms_norm_value_cache.ragged.paged")
def norm_cache(call: Call, *operands: torch.Tensor) -> None:
    """Normalise this step's keys (or values) where they lie, per head or over all heads."""
    gamma, layer, _, offsets = operands[OPERANDS:]
    cache = PagedCache.from_operands(operands[:OPERANDS], layer)
    which = VALUES if "value" in call.node.symbol else KEYS
    new = cache.new(which, offsets)
    columns = len(gamma)
    if call.attribute("per_head_norm", True):
        part = new[..., :columns]
        new = torch.cat([_normal(call, part, gamma), new[..., columns:]], -1)
    else:
        flat = new.flatten(1)
        joined = torch.cat([_normal(call, flat[:, :columns], gamma), flat[:, columns:]], -1)
        new = joined.reshape(new.shape)
    cache.store(which, new, offsets)


def _normal(call: Call, x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return rms_norm(
        x,
        gamma,
        float(call.attribute("epsilon")),
        weight_offset=float(call.attribute("weight_offset")),
        multiply_before_cast=bool(call.attribute("multiply_before_cast")),
    )


@kernel("mo.fused_qk_rms_norm.ragged.paged")
def norm_query_and_keys(
    call: Call, q: torch.Tensor, offsets: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """RMSNorm per head of the queries (returned) and of this step's cached keys (in place)."""
    q_gamma, k_gamma, epsilon, layer, offset = rest[OPERANDS:]
    cache = PagedCache.from_operands(rest[:OPERANDS], layer)
    settings = (float(epsilon), float(offset), bool(call.attribute("multiply_before_cast")))
    cache.store(KEYS, _with(settings, cache.new(KEYS, offsets), k_gamma), offsets)
    return _with(settings, q, q_gamma)


@kernel("mo.fused_qk_rms_norm_rope.ragged.paged")
def norm_and_rotate(
    call: Call, q: torch.Tensor, offsets: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """As above, then rotation; narrower frequencies rotate the leading dims of the head."""
    q_gamma, k_gamma, frequencies, epsilon, layer, offset = rest[OPERANDS:]
    cache = PagedCache.from_operands(rest[:OPERANDS], layer)
    settings = (float(epsilon), float(offset), bool(call.attribute("multiply_before_cast")))
    _, position = cache.positions(offsets)
    interleaved = bool(call.attribute("interleaved"))

    def both(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        normal = _with(settings, x, gamma)
        return rotate(normal, frequencies[position], interleaved=interleaved, first=True)

    cache.store(KEYS, both(cache.new(KEYS, offsets), k_gamma), offsets)
    return both(q, q_gamma)


@kernel("mo.fused_qk_rope.ragged.paged")
def rotate_query_and_keys(
    call: Call, q: torch.Tensor, offsets: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """Rotate the queries (returned) and this step's cached keys (in place)."""
    frequencies, layer = rest[OPERANDS:]
    cache = PagedCache.from_operands(rest[:OPERANDS], layer)
    _, position = cache.positions(offsets)
    interleaved = bool(call.attribute("interleaved"))
    chosen = frequencies[position]
    cache.store(KEYS, rotate(cache.new(KEYS, offsets), chosen, interleaved=interleaved), offsets)
    return rotate(q, chosen, interleaved=interleaved)


@kernel("mo.fused_qk_rope.ragged.paged.with_position_id")
def rotate_at(
    call: Call, q: torch.Tensor, offsets: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """As above at given positions, [sections, tokens]."""
    frequencies, positions, layer = rest[OPERANDS:]
    cache = PagedCache.from_operands(rest[:OPERANDS], layer)
    chosen = sectioned(frequencies, positions, str(call.attribute("mrope_section")))
    interleaved = bool(call.attribute("interleaved"))
    cache.store(KEYS, rotate(cache.new(KEYS, offsets), chosen, interleaved=interleaved), offsets)
    return rotate(q, chosen, interleaved=interleaved)


def _with(
    settings: tuple[float, float, bool], x: torch.Tensor, gamma: torch.Tensor
) -> torch.Tensor:
    epsilon, offset, before = settings
    return rms_norm(x, gamma, epsilon, weight_offset=offset, multiply_before_cast=before)


@kernel("mo.reduce.row_mean_of_squares")
def mean_of_squares(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Mean of squares of every row, float32."""
    return x.float().square().mean(-1, keepdim=True)


@kernel("mo.reduce.row_mean_of_squares_qk")
def mean_of_squares_qk(call: Call, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Means of squares of the rows of q and of k, [rows, 2] float32."""
    return torch.stack([q.float().square().mean(-1), k.float().square().mean(-1)], -1)


@kernel("mo.norm.apply_qk_rms_norm")
def apply_norm(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    variance: torch.Tensor,
    q_gamma: torch.Tensor,
    k_gamma: torch.Tensor,
    epsilon: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """Scale q and k by given mean squares and by their weights."""
    factor = torch.rsqrt(variance + float(epsilon))
    return [q.float() * factor[:, :1] * q_gamma, k.float() * factor[:, 1:] * k_gamma]
