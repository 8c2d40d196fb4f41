"""Reading and writing by index: gather, scatter and their N-dimensional forms."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, op


def _wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    """Indices as int64, negative ones counted from the end."""
    index = index.long()
    return torch.where(index < 0, index + size, index)


@op("gather")
def gather(call: Call, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Whole slices along an axis; the index's shape takes the axis's place."""
    axis = call.attribute("axis") % x.ndim
    flat = _wrapped(index, x.shape[axis]).reshape(-1)
    picked = x.index_select(axis, flat)
    return picked.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


@op("gather_nd")
def gather_nd(call: Call, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Slices addressed by the last axis of the index, after `batch_dims` shared axes."""
    batch = int(call.attribute("batch_dims"))
    depth = index.shape[-1]
    axes = [_wrapped(index[..., i], x.shape[batch + i]) for i in range(depth)]
    shared = [
        torch.arange(x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(axes[0].ndim)])
        for axis in range(batch)
    ]
    return x[(*shared, *axes)]


@op("gather_sum")
def gather_sum(call: Call, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Sum of the rows that each row of the index names."""
    return x[index.long()].sum(-2)


_COMBINE = {
    "scatter": None,
    "scatter_add": "sum",
    "scatter.add": "sum",
    "scatter_max": "amax",
    "scatter.max": "amax",
    "scatter_min": "amin",
    "scatter.min": "amin",
    "scatter_mul": "prod",
    "scatter.mul": "prod",
}


@op(*_COMBINE)
def scatter(
    call: Call, x: torch.Tensor, updates: torch.Tensor, index: torch.Tensor, *axis: torch.Tensor
) -> torch.Tensor:
    """Write, or combine, `updates` element by element along an axis."""
    along = int(axis[0].item()) if axis else int(call.attribute("axis"))
    index = _wrapped(index, x.shape[along])
    combine = _COMBINE[call.node.kind]
    if combine is None:
        return x.scatter(along, index, updates)
    return x.scatter_reduce(along, index, updates, combine, include_self=True)


_COMBINE_ND = {
    "scatter_nd": None,
    "scatter_nd.add": "sum",
    "scatter_nd.max": "amax",
    "scatter_nd.min": "amin",
    "scatter_nd.mul": "prod",
}


@op(*_COMBINE_ND)
def scatter_nd(
    call: Call, x: torch.Tensor, updates: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """Write, or combine, slices addressed by the last axis of the index."""
    return scatter_slices(x, updates, index, _COMBINE_ND[call.node.kind])


def scatter_slices(
    x: torch.Tensor, updates: torch.Tensor, index: torch.Tensor, combine: str | None
) -> torch.Tensor:
    """Copy of `x` with the addressed slices replaced, or combined by a torch reduction's name."""
    depth = index.shape[-1]
    rows = torch.zeros(index.shape[:-1], dtype=torch.int64)
    for axis in range(depth):
        rows = rows * x.shape[axis] + _wrapped(index[..., axis], x.shape[axis])
    tail = x.shape[depth:]
    flat = x.reshape(-1, *tail).clone()
    values = updates.reshape(-1, *tail)
    if combine is None:
        flat[rows.reshape(-1)] = values
    else:
        name = rows.reshape(-1, *[1] * len(tail)).expand(values.shape)
        flat = flat.scatter_reduce(0, name, values, combine, include_self=True)
    return flat.reshape(x.shape)


@op("arg_nonzero")
def arg_nonzero(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Row-major coordinates of the elements that are not zero."""
    return torch.nonzero(x)
