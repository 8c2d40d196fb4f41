"""How far a right port's logits may be from the reference's, derived from the reference itself.

The reference is run again with every module's result disturbed by the working dtype's rounding.
How far that moves the logits is how well-conditioned they are; a port may differ by a small
multiple of it. In float32 the order of additions alone moves logits, which sets a floor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxport.verify.reference import Reference

#: Half a unit in the last place, relative, by working dtype.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
#: How many times the disturbed reference's move a right port may differ by.
MULTIPLE = 4.0
#: Smallest tolerance as a share of the logits' range: two right orders of float32 additions. Four
#: times the share that the worst of bench/results/families.json's right ports needs (1.2e-6).
FLOOR = 5e-6


@dataclass(frozen=True)
class Tolerance:
    """The tolerance of one probe and what it was derived from.

    Attributes:
        value: Largest allowed absolute difference of a logit.
        move: Largest move of a logit when the reference is disturbed.
        logit_range: Largest minus smallest reference logit.
        dtype: Working dtype whose rounding was used.
    """

    value: float
    move: float
    logit_range: float
    dtype: str

    @property
    def derivation(self) -> str:
        """The formula with its numbers."""
        floor = FLOOR * self.logit_range
        return (
            f"max({MULTIPLE:g} x {self.move:.2e} (reference with {self.dtype} rounding), "
            f"{FLOOR:g} x {self.logit_range:.3g} (logit range) = {floor:.2e}) = {self.value:.2e}"
        )


def derive(
    reference: Reference,
    sequences: Mapping[int, tuple[int, ...]],
    logits: Mapping[int, np.ndarray],
    dtype: str,
    *,
    seed: int = 0,
) -> Tolerance:
    """Tolerance for a probe: disturb the reference on its sequences.

    Args:
        reference: The loaded reference.
        sequences: The probe's sequences.
        logits: The undisturbed reference's logits of the same sequences.
        dtype: The port's working dtype; an unknown one is judged as bfloat16.
        seed: Of the disturbance.
    """
    rounding = ROUNDING.get(dtype, ROUNDING["bfloat16"])
    move = 0.0
    with disturbed(reference.model, rounding, dtype, seed):
        for key, tokens in sequences.items():
            moved = reference.logits(tokens)
            move = max(move, float(np.abs(moved - logits[key]).max()))
    width = max(float(rows.max()) for rows in logits.values())
    width -= min(float(rows.min()) for rows in logits.values())
    return Tolerance(max(MULTIPLE * move, FLOOR * width), move, width, dtype)


@contextlib.contextmanager
def disturbed(model: Any, rounding: float, dtype: str, seed: int) -> Iterator[None]:
    """Inside, every module's floating result carries a random relative error up to `rounding`.

    Weights are rounded to `dtype` as the port's are.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def shake(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            noise = torch.rand(value.shape, generator=generator, dtype=value.dtype)
            return value * (1 + rounding * (2 * noise - 1))
        return value

    def hook(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(shake(value) for value in output)
        return shake(output)

    handles = [module.register_forward_hook(hook) for module in _rounding_modules(model)]
    kept = _round_weights(model, dtype)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for parameter, original in kept:
                parameter.copy_(original)


def _rounding_modules(model: Any) -> list[Any]:
    """Modules without children, and the layers: where a port's values are rounded at least once."""
    import torch

    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    layers = [layer for m in lists for layer in m if any(True for _ in layer.children())]
    return [*leaves, *layers]


def _round_weights(model: Any, dtype: str) -> list[tuple[Any, Any]]:
    """Round the parameters that `dtype` cannot hold, in place; (parameter, original) of each."""
    import torch

    if dtype == "float32":
        return []
    target = getattr(torch, dtype, torch.bfloat16)
    kept = []
    with torch.no_grad():
        for parameter in model.parameters():
            rounded = parameter.to(target).to(parameter.dtype)
            if not torch.equal(rounded, parameter):
                kept.append((parameter, parameter.clone()))
                parameter.copy_(rounded)
    return kept
