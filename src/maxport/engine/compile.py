"""Compile built graphs with MAX and run them on the device they were built for.

Compiling costs a fixed 16 s and about 45 s for the first matrix product; further graphs in the same
module are cheap. So graphs are compiled together, in one `max.graph.Module`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxport.engine.batch import STATES
from maxport.engine.build import BuiltGraph
from maxport.engine.inputs import Role
from maxport.engine.runner import CachedRunner, Runner, to_numpy
from maxport.errors import MaxportError

#: Unused page-table columns that compiled kernels may read (max.nn.kv_cache.utils).
LUT_PADDING = 16


class CompiledRunner(CachedRunner):
    """Runs a compiled graph; the cache lives in driver buffers.

    Args:
        built: The graph.
        model: The initialised `max.engine.Model`.
        devices: Driver devices, by the index that the graph's inputs name.
    """

    def __init__(
        self, built: BuiltGraph, model: Any, devices: Sequence[Any], *, capacity: int = 2048
    ) -> None:
        self.model, self.devices = model, list(devices)
        self._bound: dict[int, Any] = {}
        super().__init__(built, capacity=capacity, lut_padding=LUT_PADDING)

    def reset(self) -> None:
        """See `Runner.reset`; recurrent states go to the device anew, zeroed."""
        super().reset()
        roles = self.built.roles
        self._bound = {i: b for i, b in self._bound.items() if roles[i].name not in STATES}

    def execute(self, inputs: list[Any]) -> list[np.ndarray]:
        """See `CachedRunner.execute`."""
        pairs = zip(self.built.roles, inputs, strict=True)
        buffers = [self._buffer(i, role, value) for i, (role, value) in enumerate(pairs)]
        return [_as_numpy(value) for value in self.model.execute(*buffers)]

    def _buffer(self, index: int, role: Role, value: Any) -> Any:
        """The input on its device; pools are moved there once and stay."""
        from max.driver import Buffer

        if index in self._bound:
            return self._bound[index]
        # Not Buffer.zeros: on a CPU its filling races with the first execution (MAX 26.7).
        is_numpy = isinstance(value, np.ndarray)
        host = Buffer.from_numpy(value) if is_numpy else Buffer.from_dlpack(value)
        on_host = self.built.device == "cpu" or role.on_host
        buffer = host if on_host else host.to(self.devices[role.device])
        if not is_numpy:
            self._bound[index] = buffer
        return buffer


def compile_graphs(graphs: Sequence[BuiltGraph], *, capacity: int = 2048) -> list[Runner]:
    """Compile graphs together and return one runner for each, in order.

    Args:
        graphs: Built for the same device; all must have been built in this process.
        capacity: Tokens that each runner's cache holds.

    Raises:
        MaxportError: The device is not there, or MAX's compiler refuses a graph; one that it
            refuses fails all that are compiled with it.
    """
    from max import driver
    from max.engine import InferenceSession

    if not graphs:
        return []
    if driver.is_virtual_device_mode():
        raise MaxportError(
            "a process that simulates GPUs cannot run compiled graphs",
            fix="start a new process, or use --engine evaluate",
        )
    devices = _devices(graphs)
    session = InferenceSession(devices=devices)
    try:
        models = _compile(session, graphs)
    except Exception as error:
        raise MaxportError(
            f"MAX does not compile the graph: {_first_cause(error)}",
            where=", ".join(graph.architecture for graph in graphs),
            fix="compile one graph at a time to find which, or use --engine evaluate",
            code=1,
        ) from error
    pairs = zip(graphs, models, strict=True)
    return [CompiledRunner(built, model, devices, capacity=capacity) for built, model in pairs]


def _devices(graphs: Sequence[BuiltGraph]) -> list[Any]:
    """The driver devices all graphs run on: the CPU, or the accelerators their inputs name."""
    from max import driver

    if any(graph.device == "cpu" for graph in graphs):
        return [driver.CPU()]
    count = 1 + max(role.device for graph in graphs for role in graph.roles)
    if driver.accelerator_count() < count:
        raise MaxportError(
            f"the graph needs {count} GPUs, {driver.accelerator_count()} found",
            fix="run on a machine with GPUs, or use --engine evaluate",
        )
    return [driver.Accelerator(index) for index in range(count)]


def _compile(session: Any, graphs: Sequence[BuiltGraph]) -> list[Any]:
    """Initialised models in the order of `graphs`; those without subgraphs share a module."""
    together = [g for g in graphs if not _has_subgraphs(g.graph)] if len(graphs) > 1 else []
    alone = [g for g in graphs if not any(g is other for other in together)]
    models: dict[int, Any] = {}
    if together:
        module, weights = merged(together)
        by_name = session.init_all(session.compile(module), weights_registry=weights)
        for index, built in enumerate(together):
            models[id(built)] = by_name[_label(index)]
    for built in alone:
        compiled = session.compile(built.graph)
        models[id(built)] = session.init(compiled, weights_registry=dict(built.weights))
    return [models[id(built)] for built in graphs]


def merged(graphs: Sequence[BuiltGraph]) -> tuple[Any, dict[str, Any]]:
    """One `max.graph.Module` with copies of all graphs, and its weights.

    Graph number i and its weights are renamed to begin with `g<i>`, so that nothing clashes.
    """
    from max._core.dialects import mo
    from max.graph import Module

    copies = [built.graph._module.clone() for built in graphs]
    base, last = copies[0], list(copies[0].body)[-1]
    weights: dict[str, Any] = {}
    for index, (built, copy) in enumerate(zip(graphs, copies, strict=True)):
        label = _label(index)
        for op in list(copy.body):
            if isinstance(op, mo.GraphOp):
                op.sym_name = label
                _prefix_weights(op, f"{label}/", mo)
            if copy is not base:
                op.move_after(last)
                last = op
        weights.update({f"{label}/{name}": value for name, value in built.weights.items()})
    base.verify()
    return Module(base), weights


def _prefix_weights(op: Any, prefix: str, mo: Any) -> None:
    for region in op.regions:
        for inner in region.front:
            if isinstance(inner, mo.ConstantExternalOp):
                inner.name = prefix + inner.name
            elif inner.regions:
                _prefix_weights(inner, prefix, mo)


def _has_subgraphs(graph: Any) -> bool:
    return len(list(graph._module.body)) > 1


def _label(index: int) -> str:
    return f"g{index}"


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[-800:]}"


def _as_numpy(buffer: Any) -> np.ndarray:
    """An output on the host; bfloat16 becomes float32."""
    import torch

    host = buffer.to(_cpu())
    if host.dtype.name in ("bfloat16", "float16"):
        return to_numpy(torch.from_dlpack(host))
    array: np.ndarray = host.to_numpy()
    return array.copy()


def _cpu() -> Any:
    from max.driver import CPU

    return CPU()
