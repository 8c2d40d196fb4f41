"""Formulas that graph ops and fused kernels share, with MAX's points of rounding."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    *,
    weight_offset: float = 0.0,
    multiply_before_cast: bool = True,
) -> torch.Tensor:
    """RMSNorm over the last axis, computed in float32 (float64 stays) and returned in x's dtype.

    Args:
        x: Any shape [..., d].
        weight: [d], or None for no weight.
        epsilon: Added to the mean square.
        weight_offset: Added to the weight (1 in Gemma).
        multiply_before_cast: Multiply by the weight in float32 and round once (Gemma), or round the
            normalised value to x's dtype first (Llama).
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if weight is None:
        return normal.to(x.dtype)
    if multiply_before_cast:
        return (normal * (weight.to(wide.dtype) + weight_offset)).to(x.dtype)
    return normal.to(x.dtype) * (weight.to(x.dtype) + weight_offset)


def layer_norm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """LayerNorm over the last axis in float32 (float64 stays), in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    normal = functional.layer_norm(
        wide, x.shape[-1:], gamma.to(wide.dtype), beta.to(wide.dtype), epsilon
    )
    return normal.to(x.dtype)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`a @ b` in `dtype`; mixed or 8-bit operands multiply in float32."""
    if a.dtype != b.dtype or a.dtype.itemsize == 1:
        return (a.float() @ b.float()).to(dtype)
    return (a @ b).to(dtype)
