"""Collectives over simulated devices: every device's shard is a tensor in this process.

The operands are one tensor per device, then one signal buffer per device, which carries no data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maxport.engine.evaluator.call import Call, Unsupported, op


def _groups(
    call: Call, operands: Sequence[torch.Tensor], count: int
) -> list[Sequence[torch.Tensor]]:
    """The first `count` operands in groups of neighbouring devices."""
    size = int(call.attribute("group_size", 0)) or count
    return [operands[start : start + size] for start in range(0, count, size)]


def _results(call: Call) -> int:
    return sum(spec is not None for spec in call.node.specs)


@op("distributed.allreduce.sum")
def allreduce(call: Call, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
    """Every device gets the sum over its group; half precision accumulates in float32."""
    results: list[torch.Tensor] = []
    for group in _groups(call, operands, _results(call)):
        results += [_sum(group)] * len(group)
    return results


@op("bundled.allreduce.sum")
def bundled_allreduce(call: Call, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
    """Allreduce of values that are bundled over all devices."""
    raise Unsupported("values bundled over devices")


@op("distributed.allgather")
def allgather(call: Call, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
    """Every device gets the pieces of its whole group, one result each (the graph joins them)."""
    devices = _results(call) // int(call.attribute("group_size"))
    results: list[torch.Tensor] = []
    for group in _groups(call, operands, devices):
        results += list(group) * len(group)
    return results


@op("distributed.reducescatter.sum")
def reducescatter(call: Call, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
    """Every device gets its part, along an axis, of the sum over its group."""
    axis = int(call.attribute("axis"))
    results: list[torch.Tensor] = []
    for group in _groups(call, operands, _results(call)):
        results += _sum(group).tensor_split(len(group), dim=axis)
    return results


@op("distributed.broadcast")
def broadcast(call: Call, value: torch.Tensor, *signals: torch.Tensor) -> Sequence[torch.Tensor]:
    """Every device gets the root's value."""
    return [value] * _results(call)


@op("distributed.scatter")
def scatter(call: Call, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
    """Device i gets chunk i; the graph repeats chunks for devices of one replica."""
    return operands[: _results(call)]


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    wide = torch.float32 if values[0].dtype.itemsize == 2 else values[0].dtype
    return torch.stack([value.to(wide) for value in values]).sum(0, dtype=wide).to(values[0].dtype)
