"""Running a built graph step by step, by evaluation or compiled: one protocol for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from maxport.engine.batch import PagedCache
from maxport.engine.build import BuiltGraph
from maxport.errors import MaxportError


@dataclass(frozen=True)
class StepOutputs:
    """What one step returned.

    Attributes:
        named: The graph's outputs by name, float32 or integer arrays.
        row_offsets: Where each sequence's tokens begin in the ragged batch, and the total.
    """

    named: Mapping[str, np.ndarray]
    row_offsets: np.ndarray


class Runner(Protocol):
    """A graph with its cache, fed batch by batch."""

    built: BuiltGraph

    def step(self, batch: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Logits, float32 (new tokens, vocab), of every new token of every sequence in `batch`.

        The keys are sequence ids of the caller's choice; the cache remembers each id's tokens.
        Needs a graph built with return_logits="all".
        """
        ...

    def outputs(
        self, batch: Mapping[int, Sequence[int]], *, return_n_logits: int = 1
    ) -> StepOutputs:
        """All outputs of one step as the graph returns them, in any ReturnLogits mode."""
        ...

    def reset(self) -> None:
        """Forget all sequences."""
        ...


class CachedRunner:
    """What all runners share: the cache, and splitting ragged outputs; subclasses execute."""

    def __init__(
        self, built: BuiltGraph, *, capacity: int = 2048, lut_padding: int = 1, seed: int = 0
    ) -> None:
        self.built = built
        self.cache = PagedCache(built, capacity=capacity, lut_padding=lut_padding, seed=seed)

    def execute(self, inputs: list[Any]) -> list[np.ndarray]:
        """Outputs of the graph for inputs in graph order; pools are changed in place."""
        raise NotImplementedError

    def outputs(
        self, batch: Mapping[int, Sequence[int]], *, return_n_logits: int = 1
    ) -> StepOutputs:
        """See `Runner.outputs`."""
        values = self.execute(self.cache.step_inputs(batch, return_n_logits=return_n_logits))
        offsets = np.cumsum([0, *(len(tokens) for tokens in batch.values())])
        return StepOutputs(dict(zip(self.built.outputs, values, strict=False)), offsets)

    def step(self, batch: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """See `Runner.step`."""
        if self.built.return_logits != "all":
            raise MaxportError("step() needs a graph built with return_logits='all'")
        out = self.outputs(batch)
        logits = out.named.get("logits")
        total = int(out.row_offsets[-1])
        if logits is None or logits.shape[0] != total:
            shape = "no" if logits is None else f"{logits.shape[0]} rows of"
            raise MaxportError(
                f"the graph returns {shape} logits for {total} tokens in ReturnLogits.ALL",
                where=self.built.architecture,
                code=1,
            )
        bounds = zip(out.row_offsets[:-1], out.row_offsets[1:], strict=True)
        rows = [logits[begin:end] for begin, end in bounds]
        return dict(zip(batch, rows, strict=True))

    def reset(self) -> None:
        """See `Runner.reset`."""
        self.cache.reset()


class EvaluatedRunner(CachedRunner):
    """Runs a built graph on torch through `maxport.engine.evaluator`, without compiling."""

    def __init__(self, built: BuiltGraph, *, capacity: int = 2048, seed: int = 0) -> None:
        from maxport.engine.evaluator import Program

        super().__init__(built, capacity=capacity, seed=seed)
        self.program = Program(built.graph)
        self.weights = torch_weights(built.weights)

    def execute(self, inputs: list[Any]) -> list[np.ndarray]:
        """See `CachedRunner.execute`."""
        import torch

        with torch.inference_mode():
            values = self.program.run(inputs, self.weights)
        return [to_numpy(value) for value in values]


def torch_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """A graph's weights as torch tensors that share their memory.

    Args:
        weights: Driver Buffers, ModuleV3 Tensors, WeightData or arrays, by graph name.
    """
    return {name: to_torch(value) for name, value in weights.items()}


def to_torch(value: Any) -> Any:
    """One weight as a torch tensor; ModuleV3 tensors give their device buffer first."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    buffer = getattr(value, "driver_tensor", None)
    if buffer is None:
        buffer = value.to_buffer() if hasattr(value, "to_buffer") else value
    return torch.from_dlpack(buffer)


def to_numpy(value: Any) -> np.ndarray:
    """A torch tensor as numpy; bfloat16 and smaller floats become float32."""
    import torch

    if value.dtype.is_floating_point and value.dtype != torch.float64:
        value = value.float()
    array: np.ndarray = value.detach().cpu().numpy()
    return array
