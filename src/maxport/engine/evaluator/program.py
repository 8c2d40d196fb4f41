"""Runs a decoded graph on torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from max.dtype import DType
from max.graph import Graph

from maxport.engine.evaluator import kernels, ops  # fill the tables  # noqa: F401
from maxport.engine.evaluator.call import KERNELS, OPS, Call, OpFunction, Unsupported
from maxport.engine.evaluator.decode import Block, Node, Spec, constant_tensor, decode
from maxport.engine.evaluator.dims import UnboundSymbol, bind
from maxport.engine.evaluator.dtypes import EIGHTH, HALF, carrier, to_torch
from maxport.engine.evaluator.source import source_line
from maxport.errors import MaxportError

Values = dict[int, torch.Tensor]
Recorder = Callable[[Node, Sequence[torch.Tensor]], None]
Substitutes = Mapping[int, torch.Tensor | Sequence[torch.Tensor]]


class Program:
    """A built graph, decoded once and ready to run many times.

    Results that depend on constants alone (rope tables) are computed in the first run and kept.

    Args:
        graph: A finished `max.graph.Graph`, V2 or V3, built for CPU, a (virtual) GPU or a mesh.
        widen: Carry half-precision values as float32. The graph's function is then seen without the
            rounding that its dtypes ask for, which hides small differences; buffers of half
            precision must be given as float32.
        widen_float8: Carry float8 as float32 too; quantized values then keep their precision.

    Raises:
        MaxportError: The graph uses ops that the evaluator does not know; all of them are named.
    """

    def __init__(self, graph: Graph, *, widen: bool = False, widen_float8: bool = False) -> None:
        self.widened = (HALF if widen else ()) + (EIGHTH if widen_float8 else ())
        self.graph = graph  # owns the MLIR context that the decoded attributes live in
        self.decoded = decode(graph)
        self._static: Values | None = None
        self._functions = {node.index: self._function(node) for node in self.decoded.nodes}
        missing = sorted({n.name for n in self.decoded.nodes if self._functions[n.index] is None})
        if missing:
            node = next(n for n in self.decoded.nodes if n.name == missing[0])
            raise MaxportError(
                f"the evaluator has no function for {_listed(missing)}",
                where=self.where(node),
                fix="run this graph compiled, or add the op to engine/evaluator",
            )
        self.constants = {
            value: constant_tensor(node.attributes["value"], spec).to(self.carrier(spec.dtype))
            for node in self.decoded.nodes
            if node.kind == "constant"
            for value, spec in zip(node.results, node.specs, strict=True)
            if value is not None and spec is not None
        }

    def carrier(self, dtype: DType) -> torch.dtype:
        """The torch dtype that carries MAX's `dtype` in this program."""
        return carrier(dtype, widen=self.widened)

    @staticmethod
    def _function(node: Node) -> OpFunction | None:
        if node.kind in _BUILT_IN:
            return _nothing
        return KERNELS.get(node.symbol) if node.symbol else OPS.get(node.kind)

    @property
    def nodes(self) -> list[Node]:
        """All ops in the order in which they were built."""
        return self.decoded.nodes

    @property
    def inputs(self) -> list[tuple[str, Spec]]:
        """Name and type of each input."""
        pairs = zip(self.decoded.argument_names, self.decoded.main.specs, strict=False)
        return [(name, spec) for name, spec in pairs if spec is not None]

    @property
    def weights(self) -> dict[str, Spec]:
        """Name and type of each weight that the main graph reads."""
        return {
            str(node.attributes["name"]): node.specs[0]
            for node in self.decoded.nodes
            if node.kind == "constant.external" and node.specs[0] is not None
        }

    def where(self, node: Node) -> str:
        """Where an op comes from: number, module path and, if tracebacks were on, source line."""
        parts = [f"op {node.index}: {node.name}"]
        if node.module:
            parts.append(f"in or after module {node.module}")
        line = source_line(self.graph, node.index)
        if line:
            parts.append(line)
        return ", ".join(parts)

    def run(
        self,
        inputs: Sequence[Any],
        weights: Mapping[str, Any],
        *,
        record: Recorder | None = None,
        substitute: Substitutes | None = None,
    ) -> list[torch.Tensor]:
        """Execute the graph.

        Args:
            inputs: Torch tensors, numpy arrays or driver buffers, in the graph's order. Values of
                buffer type (the paged cache) are changed in place.
            weights: Tensors by the names the graph gives them; used as they are, never copied.
            record: Called after every op with the op and its results.
            substitute: Results to use in place of an op's own, by op number.

        Returns:
            The graph's outputs, in order; unsigned integers wider than 8 bits come back as int64.

        Raises:
            MaxportError: An input or weight is missing or has the wrong shape or dtype, or an op
                failed; the message names op, module path and source line.
        """
        frame = Frame(self, weights, record, substitute or {})
        arguments, copied = self._bind(inputs, frame)
        with torch.inference_mode():
            outputs = frame.run(self.decoded.main, arguments)
        if self._static is None and not record and not substitute:
            self._static = frame.static
        for original, widened in copied:
            _write_back(original, widened)
        return outputs

    def _bind(
        self, inputs: Sequence[Any], frame: Frame
    ) -> tuple[list[torch.Tensor | None], list[tuple[Any, torch.Tensor]]]:
        block, names = self.decoded.main, self.decoded.argument_names
        specs = [spec for spec in block.specs if spec is not None]
        if len(inputs) != len(specs):
            unbound = [f"{n} ({s})" for n, s in zip(names, specs, strict=False)][len(inputs) :]
            detail = f"; unbound: {_listed(unbound)}" if unbound else ""
            raise MaxportError(
                f"the graph {self.graph.name} takes {len(specs)} inputs, "
                f"{len(inputs)} were given{detail}"
            )
        bound: list[torch.Tensor | None] = []
        copied: list[tuple[Any, torch.Tensor]] = []
        given = iter(inputs)
        for index, spec in enumerate(block.specs):
            if spec is None:
                bound.append(None)
                continue
            value = next(given)
            tensor = self._input(names[index], spec, value, frame.symbols)
            if spec.buffer and tensor.dtype == torch.int64 and _is_unsigned(value):
                copied.append((value, tensor))
            bound.append(tensor)
        return bound, copied

    def _input(self, name: str, spec: Spec, value: Any, symbols: dict[str, int]) -> torch.Tensor:
        where = f"input {name} of graph {self.graph.name}"
        if value is None:
            raise MaxportError(f"input {name} is unbound", where=where, fix=f"pass a {spec}")
        tensor = to_torch(value)
        if tensor.dtype in self.widened and not spec.buffer:
            tensor = tensor.float()
        if tensor.dtype != self.carrier(spec.dtype):
            raise MaxportError(
                f"input {name} is {tensor.dtype}, the graph wants {spec}", where=where
            )
        known = dict(symbols)
        if not bind(spec.dims, tensor.shape, symbols):
            sizes = {str(d): known[str(d)] for d in spec.dims if str(d) in known}
            already = f" where {sizes}" if sizes else ""
            raise MaxportError(
                f"input {name} has shape {list(tensor.shape)}, the graph wants {spec}{already}",
                where=where,
            )
        return tensor


class Frame:
    """One run of a graph or subgraph: symbol values, weights, and the tensors alive."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Any],
        record: Recorder | None,
        substitute: Substitutes,
        prefix: str = "",
    ) -> None:
        self.program, self.weights, self.prefix = program, weights, prefix
        self.record, self.substitute = record, substitute
        self.symbols: dict[str, int] = {}
        self.values: Values = {}
        self.static: Values = {}

    def call(self, name: str, prefix: str, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a subgraph; its weights' names are prefixed by `prefix`."""
        frame = Frame(self.program, self.weights, self.record, self.substitute, prefix)
        block = self.program.decoded.subgraphs[name]
        given = iter(arguments)
        bound = [None if spec is None else next(given) for spec in block.specs]
        for spec, value in zip(block.specs, bound, strict=True):
            if spec is not None and value is not None:
                bind(spec.dims, value.shape, frame.symbols)
        return frame.run(block, bound)

    def run(self, block: Block, arguments: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Run a block; the operands of its terminator, without chains, are the result."""
        for number, argument in zip(block.arguments, arguments, strict=True):
            if number is not None and argument is not None:
                self.values[number] = argument
        values, program = self.values, self.program
        cached = program._static if self.record is None and not self.substitute else None
        for node in block.nodes:
            if node.kind in _TERMINATORS:
                return [values[value] for value in node.operands if value is not None]
            if node.static and cached is not None:
                for number in node.results:
                    if number is not None and number in cached:
                        values[number] = cached[number]
            else:
                self._execute(node)
            for number in node.dead:
                values.pop(number, None)
        return []

    def _execute(self, node: Node) -> None:
        program = self.program
        results: Sequence[torch.Tensor]
        if node.index in self.substitute:
            given = self.substitute[node.index]
            results = [given] if isinstance(given, torch.Tensor) else list(given)
        elif node.kind == "constant":
            results = [program.constants[value] for value in node.results if value is not None]
        elif node.kind == "constant.external":
            results = [self._weight(node)]
        else:
            results = self._compute(node)
        self._store(node, results)
        if self.record is not None and results:
            self.record(node, results)

    def _compute(self, node: Node) -> Sequence[torch.Tensor]:
        operands = [self.values[value] for value in node.operands if value is not None]
        function = self.program._functions[node.index]
        assert function is not None  # Program refuses graphs with unknown ops
        try:
            result = function(Call(node, self), *operands)
        except MaxportError:
            raise
        except Unsupported as error:
            raise MaxportError(
                f"the evaluator does not know this variant of {node.name}: {error}",
                where=self.program.where(node),
                fix="run this graph compiled",
            ) from error
        except UnboundSymbol as error:
            raise MaxportError(
                f"{node.name} needs the size {error}, which no input or earlier op gives",
                where=self.program.where(node),
            ) from error
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
            shapes = ", ".join(f"{value.dtype}{list(value.shape)}" for value in operands)
            raise MaxportError(
                f"{node.name} failed on operands {shapes}: {error}", where=self.program.where(node)
            ) from error
        if result is None:
            return []
        return [result] if isinstance(result, torch.Tensor) else result

    def _store(self, node: Node, results: Sequence[torch.Tensor]) -> None:
        given = iter(results)
        for number, spec in zip(node.results, node.specs, strict=True):
            if number is None or spec is None:
                continue
            value = next(given, None)
            if value is None:
                raise MaxportError(
                    f"{node.name} gave too few results", where=self.program.where(node)
                )
            dtype = self.program.carrier(spec.dtype)
            if value.dtype != dtype:
                value = value.to(dtype)
            if not bind(spec.dims, value.shape, self.symbols):
                raise MaxportError(
                    f"{node.name} gave {list(value.shape)}, the graph declares {spec}",
                    where=self.program.where(node),
                )
            self.values[number] = value
            if node.static:
                self.static[number] = value

    def _weight(self, node: Node) -> torch.Tensor:
        name = str(node.attributes["name"])
        if node.attributes.get("is_placeholder"):
            name = self.prefix + name
        value = self.weights.get(name)
        if value is None:
            close = difflib.get_close_matches(name, list(self.weights), n=1)
            raise MaxportError(
                f"the weight {name} was not given",
                where=self.program.where(node),
                fix=f"the closest given name is {close[0]}" if close else "",
            )
        tensor = to_torch(value)
        spec = node.specs[0]
        assert spec is not None
        if tensor.dtype != carrier(spec.dtype):
            raise MaxportError(
                f"the weight {name} is {tensor.dtype}, the graph wants {spec}",
                where=self.program.where(node),
            )
        if not bind(spec.dims, tensor.shape, self.symbols):
            raise MaxportError(
                f"the weight {name} has shape {list(tensor.shape)}, the graph wants {spec}",
                where=self.program.where(node),
            )
        return tensor.float() if tensor.dtype in self.program.widened else tensor


_TERMINATORS = frozenset({"output", "yield", "while.condition"})
_BUILT_IN = _TERMINATORS | {"constant", "constant.external"}


def _nothing(call: Call, *operands: torch.Tensor) -> None:
    """Stands for ops that `Frame` handles itself."""


def _listed(items: Sequence[str], most: int = 8) -> str:
    text = ", ".join(items[:most])
    return f"{text} and {len(items) - most} more" if len(items) > most else text


def _is_unsigned(value: Any) -> bool:
    return str(getattr(value, "dtype", "")).rpartition(".")[2] in ("uint16", "uint32", "uint64")


def _write_back(original: Any, widened: torch.Tensor) -> None:
    """Copy a changed buffer of unsigned integers back to where the caller keeps it."""
    if isinstance(original, np.ndarray):
        original[...] = widened.numpy().astype(original.dtype)
    elif isinstance(original, torch.Tensor):
        original.copy_(widened.to(original.dtype))
    else:
        target = torch.from_dlpack(original)
        target.copy_(widened.to(target.dtype))
