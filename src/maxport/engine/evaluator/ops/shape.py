"""Ops that move or view elements: reshape, slice, split, concat, pad, tile, range."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from maxport.engine.evaluator.call import Call, op
from maxport.engine.evaluator.dims import resolve


def _numbers(x: torch.Tensor) -> list[int]:
    return [int(value) for value in x.reshape(-1).tolist()]


@op("reshape", "static.reshape")
def reshape(call: Call, x: torch.Tensor, *shape: torch.Tensor) -> torch.Tensor:
    """View or copy with the declared shape."""
    return x.reshape(call.shape())


@op("broadcast_to", "static.broadcast_to", "broadcast_like")
def broadcast_to(call: Call, x: torch.Tensor, *shape: torch.Tensor) -> torch.Tensor:
    """Repeat size-1 axes, without copying."""
    return x.expand(call.shape())


@op("rebind", "rebind_tensor_shape")
def rebind(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Give dimensions new names; the declared sizes are checked where the result is stored."""
    return x


@op("transfer")
def transfer(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Copy to another device; all devices are one here."""
    return x


@op("transpose")
def transpose(call: Call, x: torch.Tensor, permutation: torch.Tensor) -> torch.Tensor:
    """Permute the axes, without copying."""
    return x.permute(_numbers(permutation))


@op("concat")
def concat(call: Call, *tensors: torch.Tensor) -> torch.Tensor:
    """Join along an axis."""
    return torch.cat(tensors, dim=call.attribute("axis"))


@op("split")
def split(
    call: Call, x: torch.Tensor, sizes: torch.Tensor, *rest: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Views of consecutive pieces along an axis."""
    return list(torch.split(x, _numbers(sizes), dim=call.attribute("axis")))


@op("slice")
def slice_(call: Call, x: torch.Tensor, *bounds: torch.Tensor) -> torch.Tensor:
    """Start, stop and step per axis, given as attributes (rmo) or as operands (mo)."""
    if bounds:
        starts, stops, steps = (_numbers(bound) for bound in bounds)
    else:
        starts, stops, steps = (
            call.sizes(call.attribute(name)) for name in ("starts", "stops", "steps")
        )
    return take_slice(x, starts, stops, steps)


def take_slice(
    x: torch.Tensor, starts: Sequence[int], stops: Sequence[int], steps: Sequence[int]
) -> torch.Tensor:
    """Python slicing on every axis; negative steps copy, because torch has no such view."""
    for axis, (start, stop, step) in enumerate(zip(starts, stops, steps, strict=True)):
        if step > 0:
            x = x[(slice(None),) * axis + (slice(start, stop, step),)]
        else:
            x = x.index_select(axis, torch.tensor(range(x.shape[axis])[start:stop:step]))
    return x


@op("pad.constant")
def pad_constant(
    call: Call, x: torch.Tensor, paddings: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Pad each axis by (before, after) elements of one value."""
    pairs = _numbers(paddings)
    reverse = [
        size for axis in range(x.ndim - 1, -1, -1) for size in pairs[2 * axis : 2 * axis + 2]
    ]
    return functional.pad(x, reverse, value=value.item())


@op("pad.reflect", "pad.repeat")
def pad_edges(call: Call, x: torch.Tensor, paddings: torch.Tensor) -> torch.Tensor:
    """Pad by mirroring, or by repeating, the elements at the edges."""
    reflect = call.node.kind == "pad.reflect"
    pairs = _numbers(paddings)
    for axis in range(x.ndim):
        before, after = pairs[2 * axis : 2 * axis + 2]
        size = x.shape[axis]
        index = torch.arange(-before, size + after)
        if reflect:
            index = index.abs()
            index = torch.where(index >= size, 2 * (size - 1) - index, index)
        x = x.index_select(axis, index.clamp(0, size - 1))
    return x


@op("tile")
def tile(call: Call, x: torch.Tensor, repeats: torch.Tensor) -> torch.Tensor:
    """Repeat whole axes."""
    return x.repeat(_numbers(repeats))


@op("range")
def range_(call: Call, start: torch.Tensor, stop: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Evenly spaced values; float64 in between, so that float32 steps do not drift."""
    first, last, stride = start.item(), stop.item(), step.item()
    dtype = torch.float64 if call.dtype().is_floating_point else torch.int64
    return torch.arange(first, last, stride, dtype=dtype).to(call.dtype())


@op("shape_to_tensor")
def shape_to_tensor(call: Call, *shape: torch.Tensor) -> torch.Tensor:
    """Dimensions as a tensor of integers."""
    return torch.tensor(call.sizes(call.attribute("shape")), dtype=call.dtype())


@op("shape_of")
def shape_of(call: Call, x: torch.Tensor) -> torch.Tensor:
    """The shape of a tensor."""
    return torch.tensor(list(x.shape), dtype=call.dtype())


@op("index.to_tensor")
def index_to_tensor(call: Call, x: torch.Tensor) -> torch.Tensor:
    """An index as a rank-0 tensor."""
    return x


@op("param.to_value")
def param_to_value(call: Call) -> torch.Tensor:
    """The value of a dimension expression."""
    return torch.tensor(resolve(call.attribute("value"), call.frame.symbols))


@op("linalg.band_part")
def band_part(
    call: Call, x: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, exclude: torch.Tensor
) -> torch.Tensor:
    """Keep (drop, when `exclude`) a band around the diagonal; -1 keeps all on that side."""
    rows = torch.arange(x.shape[-2])[:, None]
    columns = torch.arange(x.shape[-1])[None]
    below, above = int(lower.item()), int(upper.item())
    inside = torch.ones(x.shape[-2:], dtype=torch.bool)
    if below >= 0:
        inside &= rows - columns <= below
    if above >= 0:
        inside &= columns - rows <= above
    if bool(exclude.item()):
        inside = ~inside
    return torch.where(inside, x, torch.zeros((), dtype=x.dtype))
