"""Convolution and pooling, channels last as MAX lays them out."""

from __future__ import annotations

import torch
from torch.nn import functional

from maxport.engine.evaluator.call import Call, Unsupported, op


def _settings(
    call: Call, operands: tuple[torch.Tensor, ...], names: tuple[str, ...]
) -> list[list[int]]:
    """Strides, dilations and paddings, given as operands (mo) or as attributes (rmo)."""
    if operands:
        return [[int(value) for value in operand.reshape(-1).tolist()] for operand in operands]
    return [call.sizes(call.attribute(name)) for name in names]


@op("conv")
def conv(
    call: Call, x: torch.Tensor, weight: torch.Tensor, *settings: torch.Tensor
) -> torch.Tensor:
    """Convolution over the axes between batch and channels."""
    strides, dilations, paddings = _settings(
        call, settings[:3], ("strides", "dilations", "paddings")
    )
    groups = int(settings[3].item()) if len(settings) > 3 else _groups(call)
    channels_last = str(call.attribute("input_layout")).endswith("C")
    if channels_last:
        x = x.movedim(-1, 1)
    layout = str(call.attribute("filter_layout"))
    if layout.endswith("CF"):  # spatial axes, then channels in and out
        weight = weight.movedim((-1, -2), (0, 1))
    elif not layout.startswith("FC"):
        raise Unsupported(f"the filter layout {layout}")
    x = _padded(x, paddings)
    functions = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
    y = functions[x.ndim](x, weight, None, strides, 0, dilations, groups)
    return y.movedim(1, -1) if channels_last else y


def _groups(call: Call) -> int:
    groups = call.attribute("num_groups", 1)
    return int(groups[0] if isinstance(groups, tuple | list) else groups)


def _padded(x: torch.Tensor, paddings: list[int], value: float = 0.0) -> torch.Tensor:
    """Pad [n, c, *spatial] by (before, after) of each spatial axis."""
    pairs = [paddings[i : i + 2] for i in range(0, len(paddings), 2)]
    flat = [size for pair in reversed(pairs) for size in pair]
    return functional.pad(x, flat, value=value) if any(flat) else x


@op("avg_pool", "max_pool")
def pool(call: Call, x: torch.Tensor, *settings: torch.Tensor) -> torch.Tensor:
    """Mean or maximum over windows of NHWC input."""
    size, strides, dilations, paddings = _settings(
        call, settings[:4], ("filter_shape", "strides", "dilations", "paddings")
    )
    maximum = call.node.kind == "max_pool"
    if call.attribute("ceil_mode", False):
        raise Unsupported("a last window that is only partly inside")
    count_padding = bool(call.attribute("count_boundary", False))
    if not maximum and any(paddings) and not count_padding:
        raise Unsupported("average pooling that leaves padding out of the mean")
    padded = _padded(x.movedim(-1, 1), paddings, -torch.inf if maximum else 0.0)
    if maximum:
        y = functional.max_pool2d(padded, size, strides, 0, dilations)
    else:
        y = functional.avg_pool2d(padded, size, strides)
    return y.movedim(1, -1)
