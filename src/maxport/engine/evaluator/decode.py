"""A MAX graph read once into plain Python: nodes, values, types and attributes.

Everything comes through MAX's MLIR bindings; no text of the graph is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import max._mlir.ir as ir
import torch
from max import _core
from max._core.dialects import builtin, kgen, m, mo, mosh
from max.driver import CPU
from max.dtype import DType
from max.graph import Graph

from maxport.engine.evaluator.dims import Dim, Symbol, read_dim
from maxport.engine.evaluator.dtypes import carrier, to_torch
from maxport.errors import MaxportError


@dataclass(frozen=True)
class Spec:
    """The type of a tensor or buffer: symbolic shape, dtype and device label."""

    dims: tuple[Dim, ...]
    dtype: DType
    buffer: bool = False
    device: str = ""

    def __str__(self) -> str:
        """Such as `float32[n, 64]`."""
        return f"{self.dtype.name}[{', '.join(map(str, self.dims))}]"


@dataclass
class Node:
    """One op of the graph.

    Attributes:
        index: Position in the walk over the whole module; nested ops count too.
        kind: The op's MLIR name without the `rmo.`/`mo.` prefixes (`add`, `reduce.rms_norm`).
        symbol: The kernel's name when the op is a custom op, else empty.
        attributes: Attributes as Python values; a custom op's parameters are merged in.
        operands: Value numbers; None for a chain.
        results: Value numbers; None for a chain.
        specs: Types of the results; None for a chain.
        blocks: Bodies of a loop or branch.
        dead: Values that no later op of the same block needs.
        module: Path of the module whose weight the op uses, or else the last one used before it
            (`layers.3.self_attn.o_proj`).
        static: Its results depend on nothing but constants.
    """

    index: int
    kind: str
    symbol: str
    attributes: dict[str, Any]
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    specs: tuple[Spec | None, ...]
    blocks: tuple[Block, ...] = ()
    dead: tuple[int, ...] = ()
    module: str = ""
    static: bool = False

    @property
    def name(self) -> str:
        """The kernel's symbol for a custom op, the op's kind otherwise."""
        return self.symbol or self.kind


@dataclass
class Block:
    """A list of nodes with its arguments (None for a chain)."""

    arguments: tuple[int | None, ...]
    specs: tuple[Spec | None, ...]
    nodes: list[Node] = field(default_factory=list)


@dataclass
class Decoded:
    """A whole module: the main graph's block and its subgraphs by name."""

    main: Block
    argument_names: tuple[str, ...]
    subgraphs: dict[str, Block]
    nodes: list[Node]


def read_type(mlir_type: Any) -> Spec | None:
    """The type of a value; None for a chain.

    Raises:
        NotImplementedError: The value is neither tensor, buffer nor chain.
    """
    kind = _core.Type._from_cmlir(mlir_type) if isinstance(mlir_type, ir.Type) else mlir_type
    if isinstance(kind, mo.TensorType | mo.BufferType):
        if not isinstance(kind.shape, mosh.ShapeAttr):
            raise NotImplementedError(f"a tensor of unknown rank: {kind}")
        device = getattr(kind, "device_ref", None)
        label = f"{device.label}:{device.id}" if isinstance(device, m.DeviceRefAttr) else ""
        dims = tuple(read_dim(value) for value in kind.shape.values)
        return Spec(dims, kind.dtype, isinstance(kind, mo.BufferType), label)
    if isinstance(kind, mo.ScalarType):
        return Spec((), DType(kind.dtype))
    return None


def read_attribute(attribute: Any) -> Any:
    """An attribute as a Python value; what has no Python counterpart stays as it is."""
    if isinstance(attribute, builtin.BoolAttr):
        return bool(attribute.value)
    if isinstance(attribute, builtin.IntegerAttr | builtin.FloatAttr | builtin.StringAttr):
        return attribute.value
    if isinstance(attribute, mosh.ShapeAttr):
        return tuple(read_dim(value) for value in attribute.values)
    if isinstance(attribute, builtin.DictionaryAttr):
        return {item.name: read_attribute(item.value) for item in attribute.value}
    if isinstance(attribute, builtin.ArrayAttr):
        return [read_attribute(item) for item in attribute.value]
    if isinstance(attribute, m.ArrayElementsAttr):
        return _elements(attribute)
    if isinstance(attribute, kgen.SIMDAttr | kgen.ParamDeclRefAttr | kgen.ParamOperatorAttr):
        return read_dim(attribute)
    if isinstance(attribute, m.DeviceRefAttr):
        return f"{attribute.label}:{attribute.id}"
    return attribute


def _elements(attribute: m.ArrayElementsAttr) -> Any:
    """A rank-0 or rank-1 elements attribute as a Python number or list."""
    raw = bytes(attribute.data.data)
    element = getattr(attribute.data.element_type, "asm", str(attribute.data.element_type))
    dtype = {
        "f32": torch.float32,
        "f64": torch.float64,
        "si64": torch.int64,
        "bf16": torch.bfloat16,
    }
    for code, kind in (*dtype.items(), ("i32", torch.int32), ("i64", torch.int64)):
        if code in element:
            values = torch.frombuffer(bytearray(raw), dtype=kind).tolist()
            return values[0] if len(values) == 1 else values
    return attribute


def constant_tensor(attribute: Any, spec: Spec) -> torch.Tensor:
    """The value of a constant op, copied out of the graph."""
    shape = [int(dim) for dim in spec.dims if isinstance(dim, int)]
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=carrier(spec.dtype))
    # Rank 0 and one-element constants read alike; rank 1 avoids the driver's rank-0 special cases.
    flat = shape if shape else [count]
    buffer = _core.graph._buffer_from_constant_attr(attribute, spec.dtype, flat, CPU())
    return to_torch(buffer).clone().reshape(shape).to(carrier(spec.dtype))


class _Reader:
    """Walks a module and numbers its values."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.nodes: list[Node] = []
        self.module = ""
        self.owners: dict[int, str] = {}
        self.constants: set[int] = set()

    def _module(self, node: Node) -> str:
        """Follow weights through the ops that only reshape or join them to where they are used."""
        if node.kind == "constant.external":
            owner = str(node.attributes["name"]).rpartition(".")[0]
            self.owners.update(dict.fromkeys(_numbered(node.results), owner))
            return owner
        operands = _numbered(node.operands)
        owners = [self.owners[value] for value in operands if value in self.owners]
        if owners and all(v in self.owners or v in self.constants for v in operands):
            self.owners.update(dict.fromkeys(_numbered(node.results), owners[0]))
            return owners[0]
        if not operands and node.kind == "constant":
            self.constants.update(_numbered(node.results))
        if owners:
            self.module = owners[0]
        return self.module

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def block(self, block: Any) -> Block:
        specs = tuple(read_type(argument.type) for argument in block.arguments)
        arguments = tuple(
            None if spec is None else self.number(argument)
            for argument, spec in zip(block.arguments, specs, strict=True)
        )
        result = Block(arguments, specs)
        for operation in block.operations:
            node = self.node(operation.operation)
            if node is not None:
                result.nodes.append(node)
        _mark_dead(result)
        return result

    def node(self, operation: Any) -> Node | None:
        kind = strip(operation.name)
        if kind == "chain.create":
            return None
        attributes: dict[str, Any] = {}
        for key in operation.attributes:
            raw = _core.Attribute._from_cmlir(operation.attributes[key])
            attributes[snake_case(key)] = raw if kind == "constant" else read_attribute(raw)
        if kind in ("conv", "conv_transpose") and "filter_layout" not in attributes:
            attributes["filter_layout"] = _layout(operation.operands[1].type)
        if kind == "call":
            attributes["callee"] = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        if kind == "custom":
            attributes.update(attributes.pop("parameters", {}))
        specs = tuple(read_type(result.type) for result in operation.results)
        node = Node(
            index=len(self.nodes),
            kind=kind,
            symbol=str(attributes.get("symbol", "")) if kind == "custom" else "",
            attributes=attributes,
            operands=tuple(self.numbers.get(value) for value in operation.operands),
            results=tuple(
                None if spec is None else self.number(result)
                for result, spec in zip(operation.results, specs, strict=True)
            ),
            specs=specs,
        )
        self.nodes.append(node)
        node.module = self._module(node)
        node.blocks = tuple(
            self.block(block) for region in operation.regions for block in region.blocks
        )
        return node


def strip(name: str) -> str:
    """An MLIR op name without its dialect: `rmo.mo.reduce.add` and `mo.reduce.add` are one op."""
    for prefix in ("rmo.mo.", "rmo.", "mo."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _layout(mlir_type: ir.Type) -> str:
    """The memory layout that a filter's type is annotated with, such as RSCF."""
    metadata = _core.Type._from_cmlir(mlir_type).metadata
    for item in metadata.value if metadata is not None else ():
        if item.name == "layout":
            return str(item.value.format.value)
    return "RSCF"


def snake_case(name: str) -> str:
    """`newShape` as `new_shape`: ops of one kind differ in how they spell their attributes."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def _numbered(values: tuple[int | None, ...]) -> list[int]:
    return [value for value in values if value is not None]


def _uses(node: Node) -> Iterator[int]:
    yield from (value for value in node.operands if value is not None)
    for block in node.blocks:
        for inner in block.nodes:
            yield from _uses(inner)


def _mark_dead(block: Block) -> None:
    """Note, on the last op that uses a value of this block, that it can be dropped."""
    own = {value for value in block.arguments if value is not None}
    for node in block.nodes:
        own.update(value for value in node.results if value is not None)
    for node in reversed(block.nodes):
        # A result that nothing uses dies where it is made.
        used = {*_uses(node), *(value for value in node.results if value is not None)}
        node.dead = tuple(value for value in used if value in own)
        own.difference_update(node.dead)


_NEVER_STATIC = ("constant.external", "custom", "call", "while", "if", "parallel", "random")


def _mark_static(block: Block) -> None:
    """Mark ops whose results are the same in every run (rope tables, masks over fixed sizes)."""
    known: set[int] = set()
    for node in block.nodes:
        fixed = all(value is not None and value in known for value in node.operands)
        if not fixed or node.kind.startswith(_NEVER_STATIC) or not node.results:
            continue
        if not all(spec is not None and _fixed_shape(spec) for spec in node.specs):
            continue
        if any(_mentions_symbol(value) for value in node.attributes.values()):
            continue
        node.static = True
        known.update(value for value in node.results if value is not None)


def _fixed_shape(spec: Spec) -> bool:
    return not spec.buffer and all(isinstance(dim, int) for dim in spec.dims)


def _mentions_symbol(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(not isinstance(item, int | float | str | bool) for item in value)
    return isinstance(value, Symbol)


def decode(graph: Graph) -> Decoded:
    """Read a built graph and the subgraphs it calls.

    Args:
        graph: A finished `max.graph.Graph` (a traced ModuleV3 model's `.graph` is one).

    Raises:
        MaxportError: The graph has no body, or uses a type the evaluator does not know.
    """
    main_operation = graph._mlir_op.operation
    module = main_operation.parent
    reader = _Reader()
    main: Block | None = None
    subgraphs: dict[str, Block] = {}
    try:
        for operation in module.operation.regions[0].blocks[0].operations:
            operation = operation.operation
            if operation.name != "mo.graph":
                continue
            name = str(ir.StringAttr(operation.attributes["sym_name"]).value)
            block = reader.block(operation.regions[0].blocks[0])
            if operation == main_operation:
                main = block
            else:
                subgraphs[name] = block
    except NotImplementedError as error:
        raise MaxportError(
            f"the graph {graph.name} uses something the evaluator does not know: {error}",
            where=reader.module,
            fix="run it compiled instead",
        ) from error
    if main is None:
        raise MaxportError(
            f"the graph {graph.name} has no body", fix="finish it with graph.output()"
        )
    _mark_static(main)
    names = [ir.StringAttr(name).value for name in main_operation.attributes["argument_names"]]
    return Decoded(main, tuple(names), subgraphs, reader.nodes)
