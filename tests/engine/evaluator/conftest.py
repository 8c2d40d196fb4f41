"""Helpers shared by the evaluator's tests: build a small graph, evaluate it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType

from maxport.engine.evaluator import evaluate

CPU = DeviceRef.CPU()
DTYPES = {
    torch.float32: DType.float32,
    torch.float64: DType.float64,
    torch.bfloat16: DType.bfloat16,
    torch.float16: DType.float16,
    torch.int32: DType.int32,
    torch.int64: DType.int64,
    torch.bool: DType.bool,
    torch.uint8: DType.uint8,
    torch.uint32: DType.uint32,
}


def input_type(value: torch.Tensor) -> TensorType:
    return TensorType(DTYPES[value.dtype], list(value.shape), CPU)


def buffer_type(value: torch.Tensor) -> BufferType:
    return BufferType(DTYPES[value.dtype], list(value.shape), CPU)


def build(
    body: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor] = (),
    name: str = "g",
    module: Any = None,
) -> Graph:
    """A graph over values typed like `inputs` and `buffers`; `body` returns its outputs."""
    types = [*map(input_type, inputs), *map(buffer_type, buffers)]
    kwargs = {"module": module} if module is not None else {}
    with Graph(name, input_types=types, **kwargs) as graph:
        values = [value.tensor for value in graph.inputs[: len(inputs)]]
        values += [value.buffer for value in graph.inputs[len(inputs) :]]
        result = body(*values)
        graph.output(*(result if isinstance(result, list | tuple) else [result]))
    return graph


def run_body(
    body: Callable[..., Any], *inputs: torch.Tensor, buffers: Sequence[torch.Tensor] = ()
) -> Any:
    """Build and evaluate; one output comes back as itself, several as a list."""
    outputs = evaluate(build(body, inputs, buffers), [*inputs, *buffers], {})
    return outputs[0] if len(outputs) == 1 else outputs


@pytest.fixture
def run() -> Callable[..., Any]:
    """`run_body` as a fixture, so that test files need no import from here."""
    return run_body


@pytest.fixture
def build_graph() -> Callable[..., Graph]:
    """`build` as a fixture."""
    return build


@pytest.fixture
def cpu() -> DeviceRef:
    return CPU


@pytest.fixture
def rand() -> Callable[..., torch.Tensor]:
    """Normal float32 values of a shape, the same in every run."""
    generator = torch.Generator().manual_seed(7)
    return lambda *shape: torch.randn(shape, generator=generator)
