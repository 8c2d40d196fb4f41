"""Element-wise arithmetic, comparison, logic, activation and casts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from maxport.engine.evaluator.call import OPS, Call, op

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": torch.abs,
    "atanh": torch.atanh,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "floor": torch.floor,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "is_inf": torch.isinf,
    "is_nan": torch.isnan,
    "log": torch.log,
    "log1p": torch.log1p,
    "negative": torch.neg,
    "not": torch.logical_not,
    "relu": torch.relu,
    "round": torch.round,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
}

_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "pow": torch.pow,
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
}

_LOGIC: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "and": (torch.logical_and, torch.bitwise_and),
    "or": (torch.logical_or, torch.bitwise_or),
    "xor": (torch.logical_xor, torch.bitwise_xor),
}


def _enter_unary(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    OPS[name] = lambda call, x: function(x)


def _enter_binary(
    name: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    OPS[name] = lambda call, x, y: function(x, y)


for _name, _function in _UNARY.items():
    _enter_unary(_name, _function)
for _name, _pair in _BINARY.items():
    _enter_binary(_name, _pair)


@op("and", "or", "xor")
def logic(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Logical on booleans, bitwise on integers."""
    logical, bitwise = _LOGIC[call.node.kind]
    return logical(x, y) if x.dtype == torch.bool else bitwise(x, y)


@op("div")
def div(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """True division of floats; integers divide towards zero, as MAX's kernel does."""
    if call.dtype().is_floating_point:
        return x / y
    return torch.div(x, y, rounding_mode="trunc")


@op("floor_div")
def floor_div(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Division rounded down."""
    return torch.div(x, y, rounding_mode="floor")


@op("mod")
def mod(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Remainder with the divisor's sign, as in Python."""
    return torch.remainder(x, y)


@op("cast")
def cast(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Convert to the result's dtype, rounding to nearest even."""
    return x.to(call.dtype())


@op("select")
def select(call: Call, condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x` where the condition holds, else `y`."""
    return torch.where(condition, x, y)
