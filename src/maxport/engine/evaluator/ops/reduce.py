"""Reductions along one axis (which stays, with size 1), softmax and running sums."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, op


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half-precision values as float32: MAX accumulates in float32 and rounds once."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@op("reduce.add")
def reduce_add(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Sum."""
    return _wide(x).sum(call.attribute("axis"), keepdim=True)


@op("reduce.mul")
def reduce_mul(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Product."""
    return _wide(x).prod(call.attribute("axis"), keepdim=True)


@op("reduce.mean")
def reduce_mean(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Arithmetic mean."""
    axis = call.attribute("axis")
    if not x.is_floating_point():
        total = x.sum(axis, keepdim=True)
        return torch.div(total, x.shape[axis], rounding_mode="trunc")
    return _wide(x).mean(axis, keepdim=True)


@op("reduce.max")
def reduce_max(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Largest value."""
    return x.amax(call.attribute("axis"), keepdim=True)


@op("reduce.min")
def reduce_min(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Smallest value."""
    return x.amin(call.attribute("axis"), keepdim=True)


@op("reduce.reduce_min_and_max")
def reduce_min_and_max(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Smallest and largest value, joined along the axis."""
    axis = call.attribute("axis")
    return torch.cat([x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)], dim=axis)


@op("reduce.arg_max", "arg_max")
def arg_max(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Index of the largest value, the first of several."""
    return x.argmax(call.attribute("axis"), keepdim=True)


@op("reduce.arg_min", "arg_min")
def arg_min(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Index of the smallest value, the first of several."""
    return x.argmin(call.attribute("axis"), keepdim=True)


@op("reduce.softmax", "softmax")
def softmax(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Softmax along an axis."""
    return torch.softmax(_wide(x), call.attribute("axis"))


@op("reduce.logsoftmax", "logsoftmax")
def logsoftmax(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Logarithm of softmax along an axis."""
    return torch.log_softmax(_wide(x), call.attribute("axis"))


@op("cumsum")
def cumsum(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Running sum; optionally without the element itself, or from the end."""
    axis = call.attribute("axis")
    exclusive, reverse = call.attribute("exclusive"), call.attribute("reverse")
    wide = _wide(x).flip(axis) if reverse else _wide(x)
    total = wide.cumsum(axis, dtype=wide.dtype)
    if exclusive:
        total = total - wide
    return total.flip(axis) if reverse else total
