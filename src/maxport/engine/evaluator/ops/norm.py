"""Normalisation: RMS, layer and group norm."""

from __future__ import annotations

import torch
from torch.nn import functional

from maxport.engine.evaluator.call import Call, op
from maxport.engine.evaluator.formulas import layer_norm, rms_norm


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
