"""Normalisation: RMS, layer and group norm."""

from __future__ import annotations

import torch
from torch.nn import functional

from maxport.engine.evaluator.call import Call, op


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


@op("reduce.rms_norm")
def reduce_rms_norm(call: Call, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm with the parameters that the op carries."""
    return rms_norm(
        x,
        weight,
        float(call.attribute("epsilon")),
        weight_offset=float(call.attribute("weight_offset")),
        multiply_before_cast=bool(call.attribute("multiply_before_cast")),
    )


@op("reduce.layer_norm")
def reduce_layer_norm(
    call: Call, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *epsilon: torch.Tensor
) -> torch.Tensor:
    """LayerNorm over the last axis; epsilon is an operand or an attribute."""
    value = float(epsilon[0].item()) if epsilon else float(call.attribute("epsilon"))
    return layer_norm(x, gamma, beta, value)


def layer_norm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """LayerNorm over the last axis in float32 (float64 stays), in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    normal = functional.layer_norm(
        wide, x.shape[-1:], gamma.to(wide.dtype), beta.to(wide.dtype), epsilon
    )
    return normal.to(x.dtype)


@op("reduce.group_norm")
def reduce_group_norm(
    call: Call,
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: torch.Tensor,
    groups: torch.Tensor,
) -> torch.Tensor:
    """GroupNorm over channels (axis 1) in `groups` groups."""
    normal = functional.group_norm(
        x.float(), int(groups.item()), gamma.float(), beta.float(), float(epsilon.item())
    )
    return normal.to(x.dtype)
