"""Run MAX's own model loading up to, not including, compilation.

A pipeline model's constructor reads the config, adapts the weights, builds its graphs and hands
them to a session. Here the session only writes down what it is given, so whatever an architecture
does to arrive at its graph happens exactly as in serving.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


@dataclass
class Staged:
    """One graph that would have been compiled, with the weights bound to it.

    `outputs` are the names of a ModuleV3 graph's outputs where it returns a dataclass; empty where
    it returns something else, None for a V2 graph.
    """

    graph: Any
    weights: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] | None = None


class _Unavailable:
    """Stands for a compiled model: can be stored and passed on, not run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unavailable()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Unavailable()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Models(dict[str, Any]):
    """A name -> model table that has every name."""

    def __missing__(self, key: str) -> Any:
        return _Unavailable()


class RecordingSession:
    """An `InferenceSession` whose compile methods record graphs and weights."""

    def __init__(self, devices: list[Any]) -> None:
        self.devices = devices
        self.staged: list[Staged] = []

    def compile_reusing_mefs(self, graph: Any, **_: Any) -> Staged:
        """Record a graph or a module of graphs."""
        staged = Staged(graph)
        self.staged.append(staged)
        return staged

    compile = compile_async = compile_reusing_mefs

    def init(
        self, compiled: Staged, weights_registry: Mapping[str, Any] | None = None, **_: Any
    ) -> Any:
        """Record the weights bound to a recorded graph."""
        compiled.weights.update(weights_registry or {})
        return _Unavailable()

    def init_all(
        self, compiled: Staged, weights_registry: Mapping[str, Any] | None = None, **_: Any
    ) -> _Models:
        """Record the weights bound to all graphs of a recorded module."""
        self.init(compiled, weights_registry)
        return _Models()

    def load(self, graph: Any, *, weights_registry: Any = None, **_: Any) -> Any:
        """Record a graph with its weights."""
        return self.init(self.compile_reusing_mefs(graph), weights_registry)

    def load_all(self, graph: Any, *, weights_registry: Any = None, **_: Any) -> _Models:
        """Record a module of graphs with its weights."""
        return self.init_all(self.compile_reusing_mefs(graph), weights_registry)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def recording(
    devices: list[Any], *, simulated: bool, check_kernels: bool = True
) -> Iterator[RecordingSession]:
    """A session that records, and MAX patched so that ModuleV3 compiles end in it too.

    Args:
        devices: Driver devices the model is built for.
        simulated: The devices cannot hold signal buffers (CPU or virtual), so none are allocated.
        check_kernels: Let MAX check every kernel call against the kernel's signature, most of the
            time of a build; unneeded for a second graph of the same calls.
    """
    import max.experimental.compilation as compilation
    import max.graph.graph as graph_module
    import max.pipelines.lib.log_probabilities as log_probabilities
    from max.driver import is_virtual_device_mode
    from max.graph.weights import WeightData

    recorder = RecordingSession(devices)

    def record(self: Any, staged: Any, weights: Any = None, *, session: Any = None) -> None:
        del session
        recorder.staged.append(Staged(staged.graph, dict(weights or {}), _output_names(staged)))
        self._engine_model = _Unavailable()

    quiet = logging.getLogger("max.pipelines")
    level = quiet.level
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compilation.CompiledCallable, "__init__", record))
        # A graph of its own beside the model's, which nothing here runs.
        stack.enter_context(
            mock.patch.object(
                log_probabilities, "log_probabilities_ragged_graph", lambda *a, **k: None
            )
        )
        if not check_kernels:
            library = graph_module.KernelLibrary
            unchecked = mock.patch.object(library, "verify_custom_op", lambda self, op: None)
            stack.enter_context(unchecked)
        if is_virtual_device_mode():
            stack.enter_context(mock.patch.object(WeightData, "astype", cast_weight))
        if simulated:
            for patch in _without_signals():
                stack.enter_context(patch)
        quiet.setLevel(logging.ERROR)
        try:
            yield recorder
        finally:
            quiet.setLevel(level)


def cast_weight(weight: Any, dtype: Any) -> Any:
    """`WeightData.astype` by torch, for weight adapters.

    MAX's own runs a graph, and in virtual device mode, where none runs, hands out memory that
    nobody wrote; a router's weights would be zeros or noise.

    Args:
        weight: A `WeightData`, any shape.
        dtype: The `DType` wanted; equal dtypes return `weight` itself.
    """
    import torch
    from max.driver import Buffer
    from max.graph.weights import WeightData

    from maxport.engine.evaluator.dtypes import carrier, to_torch

    if weight.dtype == dtype:
        return weight
    values = to_torch(weight).to(carrier(dtype)).contiguous()
    shape = tuple(values.shape)
    octets = values.reshape(-1).view(torch.uint8)  # dlpack does not carry every dtype
    return WeightData(
        data=Buffer.from_dlpack(octets).view(dtype, shape),
        name=weight.name,
        dtype=dtype,
        shape=weight.shape,
        quantization_encoding=weight.quantization_encoding,
    )


def _output_names(staged: Any) -> tuple[str, ...]:
    """Field names of a staged callable's result, in the order of the graph's outputs."""
    from max import tree

    result = tree.unflatten(staged.out_tree, list(range(len(staged.out_layouts))))
    if not dataclasses.is_dataclass(result):
        return ()
    at = {getattr(result, field.name): field.name for field in dataclasses.fields(result)}
    return tuple(str(at.get(index, f"output_{index}")) for index in range(len(staged.out_layouts)))


def _without_signals() -> list[Any]:
    """Patches that keep MAX from allocating accelerator memory for collectives.

    On a CPU `Signals.allocate` crashes the process and `Allreduce` asks for a GPU that is not
    there; graphs only need the buffers' types.
    """
    import max.nn.comm.allreduce as allreduce

    def plain_init(self: Any, num_accelerators: int) -> None:
        super(allreduce.Allreduce, self).__init__()
        self.devices = list(range(num_accelerators))

    return [
        mock.patch.object(allreduce.Signals, "allocate", staticmethod(lambda devices: [])),
        mock.patch.object(allreduce.Signals, "buffers", lambda self: []),
        mock.patch.object(allreduce.Allreduce, "__init__", plain_init),
    ]
