"""Dimensions of a graph: integers, symbols and expressions over them.

A graph's types mention symbols (`total_seq_len`) and expressions (`add(n, -1)`). Symbols get their
value from the first value of that type that is seen: an input, or an op whose size depends on data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from max._core.dialects import builtin, kgen


@dataclass(frozen=True)
class Symbol:
    """A named dimension."""

    name: str

    def __str__(self) -> str:
        """The name, as in the graph's text."""
        return self.name


@dataclass(frozen=True)
class Expression:
    """An operation on dimensions, such as `add(n, -1)`."""

    operation: str
    operands: tuple[Dim, ...]

    def __str__(self) -> str:
        """As in the graph's text."""
        return f"{self.operation}({', '.join(map(str, self.operands))})"


Dim = int | Symbol | Expression


class UnboundSymbol(Exception):
    """A dimension depends on a symbol that has no value yet."""


def _ceil_div(left: int, right: int) -> int:
    return -(-left // right)


def _product(*factors: int) -> int:
    result = 1
    for factor in factors:
        result *= factor
    return result


_OPERATIONS: dict[str, Callable[..., int]] = {
    "add": lambda *terms: sum(terms),
    "mul": _product,
    "mul_no_wrap": _product,
    "max": max,
    "min": min,
    "div": lambda left, right: left // right,
    "div_s": lambda left, right: int(left / right),
    "div_u": lambda left, right: left // right,
    "floor_div_s": lambda left, right: left // right,
    "ceil_div_s": _ceil_div,
    "ceil_div_u": _ceil_div,
    "mod": lambda left, right: left % right,
    "rem_s": lambda left, right: left - right * int(left / right),
    "rem_u": lambda left, right: left % right,
    "shl": lambda left, right: left << right,
    "shr": lambda left, right: left >> right,
    "eq": lambda left, right: int(left == right),
    "lt": lambda left, right: int(left < right),
    "le": lambda left, right: int(left <= right),
    "cond": lambda test, then, other: then if test else other,
    "and_": lambda left, right: left & right,
    "or_": lambda left, right: left | right,
    "xor": lambda left, right: left ^ right,
}


def read_dim(attribute: Any) -> Dim:
    """A dimension from its attribute in the graph.

    Raises:
        NotImplementedError: The attribute is of a kind that no known graph uses.
    """
    if isinstance(attribute, kgen.SIMDAttr):
        attribute = kgen.CastToBuiltinAttr(attribute)
    if isinstance(attribute, builtin.IntegerAttr):
        return int(attribute.value)
    if isinstance(attribute, kgen.ParamDeclRefAttr):
        return Symbol(_symbol_name(attribute))
    if isinstance(attribute, kgen.ParamOperatorAttr):
        name = attribute.opcode.name
        if name not in _OPERATIONS:
            raise NotImplementedError(f"dimension operation {name}")
        return Expression(name, tuple(read_dim(operand) for operand in attribute.operands))
    raise NotImplementedError(f"dimension {attribute}")


def _symbol_name(attribute: Any) -> str:
    name = attribute.name
    return str(getattr(name, "value", name))


def resolve(dim: Dim, values: dict[str, int]) -> int:
    """The value of `dim`.

    Raises:
        UnboundSymbol: It mentions a symbol that `values` lacks.
    """
    if isinstance(dim, int):
        return dim
    if isinstance(dim, Symbol):
        try:
            return values[dim.name]
        except KeyError:
            raise UnboundSymbol(dim.name) from None
    return _OPERATIONS[dim.operation](*(resolve(operand, values) for operand in dim.operands))


def bind(dims: Sequence[Dim], sizes: Sequence[int], values: dict[str, int]) -> bool:
    """Match `sizes` against `dims`, giving new symbols their value in `values`.

    Returns:
        False if the ranks or any size disagree.
    """
    if len(dims) != len(sizes):
        return False
    for dim, size in zip(dims, sizes, strict=True):
        if isinstance(dim, int):
            if dim != size:
                return False
        elif isinstance(dim, Symbol):
            if values.setdefault(dim.name, size) != size:
                return False
        else:
            try:
                if resolve(dim, values) != size:
                    return False
            except UnboundSymbol:
                continue  # nothing to compare with; a later use will bind it or fail
    return True
