"""Number triples, one per twin size, that never coincide within a twin or between sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Triple = tuple[int, int, int]
FloatTriple = tuple[float, float, float]


@dataclass(frozen=True)
class HeadPlan:
    """Attention sizes of the three twins: query heads, kv heads, head_dim and hidden size."""

    heads: Triple
    kv_heads: Triple
    head_dim: Triple
    hidden: Triple


def _plan(heads: Triple, kv: Triple, dim: Triple, per_head: Triple) -> HeadPlan:
    hidden = tuple(h * m for h, m in zip(heads, per_head, strict=True))
    return HeadPlan(heads, kv, dim, (hidden[0], hidden[1], hidden[2]))


# (query heads, hidden / heads, explicit head_dim). Each list keeps one answer to "is the number of
# heads a power of two" over all sizes: ALiBi's slopes depend on it.
_POWERS = (((4, 8, 16), (20, 16, 12), (28, 24, 20)),)
_OTHERS = (((6, 12, 10), (20, 14, 16), (28, 16, 24)), ((12, 20, 28), (16, 8, 6), (10, 12, 14)))
# (query heads, kv heads, explicit head_dim, hidden / heads, derived head_dim). The groups
# (heads / kv heads) differ too, so that no repeat count is the same number at every size.
_GROUPED = ((6, 8, 12), (2, 4, 3), (20, 24, 16), (16, 14, 10), (20, 16, 14))
_GROUPED_POWERS = ((8, 16, 32), (2, 8, 4), (20, 12, 10), (14, 10, 6), (16, 12, 6))


def head_plans(
    heads: int, kv: str, *, explicit: bool, alibi: bool, head_dim: int | None
) -> Iterator[HeadPlan]:
    """Candidate attention sizes, best first.

    Args:
        heads: The real number of query heads.
        kv: "grouped" (a field for kv heads), "single" (the field says 1) or "full" (no field).
        explicit: The config has a head_dim of its own, apart from hidden_size / heads.
        alibi: The config says that positions are ALiBi.
        head_dim: Force this head_dim at every size; None picks distinct ones.
    """
    if kv == "grouped":
        orders = [_GROUPED_POWERS] if alibi else [_GROUPED, _GROUPED_POWERS]
        for only_derived in (False, True):
            for q, k, dim, per_head, derived in orders:
                if head_dim:
                    dim = derived = (head_dim, head_dim, head_dim)
                if explicit and not only_derived:
                    yield _plan(q, k, dim, per_head)
                elif explicit == only_derived:
                    yield _plan(q, k, derived, derived)
    ones = (1, 1, 1)
    first, second = (_POWERS, _OTHERS) if heads & (heads - 1) == 0 else (_OTHERS, _POWERS)
    for q, per_head, dim in (*first, *second):
        groups = ones if kv == "single" else q
        derived = per_head
        if head_dim:
            dim = derived = (head_dim, head_dim, head_dim)
        if explicit:
            yield _plan(q, groups, dim, per_head)
        yield _plan(q, groups, derived, derived)


class Allocator:
    """Hands out triples of numbers none of which was handed out before."""

    def __init__(self) -> None:
        self._ints: set[int] = set()
        self._floats: set[float] = {0.0, 1.0}
        self._turn = 0

    def reserve(self, *numbers: int) -> None:
        """Keep `numbers` from being handed out."""
        self._ints.update(numbers)

    def ints(self, start: int, *, step: int = 1, ok: Callable[[int], bool] | None = None) -> Triple:
        """Three unused integers from `start` upwards in steps of `step` for which `ok` holds."""
        found: list[int] = []
        value = start
        while len(found) < 3:
            if value not in self._ints and (ok is None or ok(value)):
                found.append(value)
                self._ints.add(value)
            value += step
        return (found[0], found[1], found[2])

    def even_below(self, limits: Triple) -> Triple:
        """Three unused even integers, each about two thirds of its limit and below it."""
        found: list[int] = []
        for limit in limits:
            aim = round(limit * 0.65)
            offsets = sorted(range(2 - aim, limit - aim), key=abs)
            evens = [aim + offset for offset in offsets if (aim + offset) % 2 == 0]
            free = [v for v in evens if v not in found and v != limit // 2]
            unused = [v for v in free if v not in self._ints and abs(v - aim) <= 3]
            found.append((unused or free or evens or [limit])[0])
        self._ints.update(found)
        return (found[0], found[1], found[2])

    def near(self, value: float, *, low: float = 0.7, high: float = 1.36) -> FloatTriple:
        """Three unused floats of `value`'s magnitude, none of them `value`, four digits each."""
        return self.between(value * low, value * high, avoid=value)

    def between(self, low: float, high: float, *, avoid: float | None = None) -> FloatTriple:
        """Three unused floats between `low` and `high`, four significant digits each."""
        found: list[float] = []
        while len(found) < 3:
            self._turn += 1
            share = (self._turn * 0.6180339887) % 1.0
            number = _digits(low + share * (high - low), 4)
            if number in self._floats or (avoid is not None and math.isclose(number, avoid)):
                continue
            found.append(number)
            self._floats.add(number)
        return (found[0], found[1], found[2])


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
