"""Mutable buffers: load, store, and the debug prints that also sequence on chains."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, op
from maxport.engine.evaluator.ops.shape import take_slice


@op("mutable.load")
def load(call: Call, buffer: torch.Tensor) -> torch.Tensor:
    """The buffer's present value; a copy, because later stores must not show through."""
    return buffer.clone()


@op("mutable.store")
def store(call: Call, buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Overwrite the whole buffer."""
    buffer.copy_(value)


@op("mutable.store.slice")
def store_slice(
    call: Call,
    buffer: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    stop: torch.Tensor,
    step: torch.Tensor,
) -> None:
    """Overwrite a slice of the buffer."""
    bounds = [[int(number) for number in bound.tolist()] for bound in (start, stop, step)]
    take_slice(buffer, *bounds).copy_(value)


@op("buffer.create")
def create(call: Call) -> torch.Tensor:
    """A new buffer; uninitialised in MAX, zeros here."""
    return torch.zeros(call.shape(), dtype=call.dtype())


@op("buffer.transfer")
def transfer(call: Call, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy one buffer's content to another."""
    target.copy_(source)


@op("debug.print", "debug.tensor.print")
def debug_print(call: Call, *tensors: torch.Tensor) -> None:
    """Prints in a compiled run; use `record=` here."""


@op("kgen.param.declare", "kgen.param.constant", "mosh.param.from_value")
def declare(call: Call, *tensors: torch.Tensor) -> None:
    """Names for sizes; values are bound where tensors of those sizes appear."""
