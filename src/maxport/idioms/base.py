"""What every idiom shares: a candidate is proposed by dataflow and accepted only by numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from maxport.ir import Graph, Node, Param, Ref, Size

#: Length of the token axis in every numeric proof.
PROOF_TOKENS = 13
#: Largest difference, relative to the largest value, at which an idiom is accepted in float64.
TOLERANCE = 1e-9


class Values(Protocol):
    """Ground truth: runs any part of the traced model in float64."""

    batch: int

    def run(self, target: str, feeds: Mapping[str, Any], part: int | None = None) -> Any:
        """The value of node `target` for the given values of other nodes."""
        ...

    def param(self, fqn: str) -> np.ndarray:
        """A parameter, buffer or constant, float64."""
        ...


@dataclass
class Candidate:
    """A proposal: node `final` and what only it needs are `op(*inputs, **attrs)`.

    Attributes:
        final: Name of the node whose value the idiom computes.
        op: The idiom's name.
        inputs: Values it reads.
        attrs: Its parameters: weights (`Param`), numbers, flags.
        formula: The idiom in numpy: input arrays to the result.
        tolerance: Largest relative difference; wider where the model stores rounded tables.
        low: Smallest integer of the proof's integer inputs.
    """

    final: str
    op: str
    inputs: list[Any]
    attrs: dict[str, Any]
    formula: Callable[..., np.ndarray]
    tolerance: float = TOLERANCE
    low: int = 0


@dataclass
class Finding:
    """One recognised idiom, or one that nearly was."""

    op: str
    scope: str
    params: dict[str, Any]
    accepted: bool
    difference: float
    why: str = ""


@dataclass
class Recogniser:
    """The graph under recognition with the ground truth and what was found so far."""

    graph: Graph
    values: Values
    findings: list[Finding] = field(default_factory=list)
    seed: int = 0

    def array(self, ref: Ref, low: int = 0) -> np.ndarray:
        """Random float64 data in the shape of a value (integers below 7 for integer values)."""
        node = self.graph.by_name()[ref.name]
        shape = node.shape[ref.part] if ref.part is not None else node.shape
        self.seed += 1
        rng = np.random.default_rng(self.seed)
        concrete = self.concrete(shape)
        if "int" in node.dtype:
            return rng.integers(low, 7, concrete)
        return rng.standard_normal(concrete) * 1.5

    def accept(self, candidate: Candidate) -> bool:
        """Compare a candidate with the traced nodes and put it into the graph if they agree."""
        refs = [v for v in candidate.inputs if isinstance(v, Ref)]
        arrays = {ref: self.array(ref, candidate.low) for ref in dict.fromkeys(refs)}
        feeds = self._feeds(arrays)
        node = self.graph.by_name()[candidate.final]
        truth = np.asarray(self.values.run(candidate.final, feeds), dtype=np.float64)
        proposed = np.asarray(candidate.formula(*[arrays[r] for r in refs]), dtype=np.float64)
        difference = relative_difference(truth, proposed)
        accepted = difference <= candidate.tolerance
        self.note(candidate.op, node.scope, candidate.attrs, accepted, difference)
        if accepted:
            node.op, node.args, node.attrs = candidate.op, list(candidate.inputs), candidate.attrs
            node.proof = f"float64, difference {difference:.1e}"
            self.graph.sweep()
        return accepted

    def concrete(self, shape: Sequence[Size]) -> tuple[int, ...]:
        """A traced shape with the symbolic axes at the proof's sizes."""
        return tuple(concrete_size(s, self.values.batch) for s in shape)

    def note(
        self, op: str, scope: str, attrs: dict[str, Any], accepted: bool, difference: float
    ) -> None:
        """Record an idiom that was accepted, or one that nearly matched."""
        why = "" if accepted else f"numbers differ by {difference:.1e} of the largest value"
        self.findings.append(Finding(op, scope, plain(attrs), accepted, difference, why))

    def _feeds(self, arrays: Mapping[Ref, np.ndarray]) -> dict[str, Any]:
        feeds: dict[str, Any] = {}
        for ref, array in arrays.items():
            if ref.part is None:
                feeds[ref.name] = array
            else:
                feeds.setdefault(ref.name, {})[ref.part] = array
        return feeds


def concrete_size(size: Size, batch: int) -> int:
    """A traced size with the symbolic axes at the proof's sizes."""
    if isinstance(size, int):
        return size
    return size.rest * (batch if size.batch else 1) * (PROOF_TOKENS if size.tokens else 1)


def relative_difference(truth: np.ndarray, proposed: np.ndarray) -> float:
    """Largest absolute difference over the largest absolute value; inf where shapes differ."""
    if truth.shape != proposed.shape or not np.isfinite(proposed).all():
        return float("inf")
    if truth.size == 0:
        return 0.0
    scale = max(float(np.abs(truth).max()), 1e-30)
    return float(np.abs(truth - proposed).max()) / scale


def plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes for a report: weights by name."""
    return {k: (v.fqn if isinstance(v, Param) else v) for k, v in attrs.items()}


def weight_of(value: Any, nodes: Mapping[str, Node]) -> tuple[Param | None, float]:
    """The parameter behind `w`, `w.float()`, `1 + w` or `w + 1`, with the number added to it."""
    offset = 0.0
    while isinstance(value, Ref) and value.part is None:
        node = nodes[value.name]
        if node.op == "cast":
            value = node.args[0]
        elif node.op == "add" and sum(isinstance(a, int | float) for a in node.args) == 1:
            number = next(a for a in node.args if isinstance(a, int | float))
            value = next(a for a in node.args if not isinstance(a, int | float))
            offset += number
        else:
            return None, 0.0
    return (value, offset) if isinstance(value, Param) else (None, 0.0)
