"""What an op's function sees of the op it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from maxport.engine.evaluator.decode import Node, Spec
from maxport.engine.evaluator.dims import Dim, resolve

if TYPE_CHECKING:
    from maxport.engine.evaluator.program import Frame

Result: TypeAlias = torch.Tensor | Sequence[torch.Tensor] | None
OpFunction: TypeAlias = Callable[..., Result]

OPS: dict[str, OpFunction] = {}
"""Functions by op kind (`add`, `reduce.rms_norm`)."""

KERNELS: dict[str, OpFunction] = {}
"""Functions by custom op symbol (`mo.mha.ragged.paged`)."""

_MISSING = object()


class Unsupported(Exception):
    """An op is known, but not in this variant; the message names the variant."""


def op(*kinds: str) -> Callable[[OpFunction], OpFunction]:
    """Enter a function in the table of ops under `kinds`.

    The function gets a `Call` and the operands' tensors, chains left out, and returns its results.
    """

    def enter(function: OpFunction) -> OpFunction:
        for kind in kinds:
            OPS[kind] = function
        return function

    return enter


def kernel(*symbols: str) -> Callable[[OpFunction], OpFunction]:
    """Enter a function in the table of custom kernels under `symbols`."""

    def enter(function: OpFunction) -> OpFunction:
        for symbol in symbols:
            KERNELS[symbol] = function
        return function

    return enter


class Call:
    """One execution of one op."""

    __slots__ = ("frame", "node")

    def __init__(self, node: Node, frame: Frame) -> None:
        self.node, self.frame = node, frame

    def attribute(self, name: str, default: Any = _MISSING) -> Any:
        """An attribute, or a custom op's parameter, as a Python value.

        Raises:
            Unsupported: The op has no such attribute and no default was given.
        """
        value = self.node.attributes.get(name, default)
        if value is _MISSING:
            raise Unsupported(f"it has no attribute {name}")
        return value

    def spec(self, index: int = 0) -> Spec:
        """The declared type of a result, counting tensors only."""
        return [spec for spec in self.node.specs if spec is not None][index]

    def dtype(self, index: int = 0) -> torch.dtype:
        """The torch dtype that a result has to have."""
        return self.frame.program.carrier(self.spec(index).dtype)

    def shape(self, index: int = 0) -> list[int]:
        """The shape that a result has to have, symbols resolved."""
        return self.sizes(self.spec(index).dims)

    def sizes(self, dims: Sequence[Dim]) -> list[int]:
        """Dimensions resolved to integers."""
        return [resolve(dim, self.frame.symbols) for dim in dims]
