"""Numbers of a traced twin as expressions over configuration fields.

A literal that differs between twins must equal one expression in all of them; a literal that is the
same in all of them belongs to the model, not to its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxport.errors import MaxportError

Number = int | float
#: Relative difference up to which two floats are the same literal, and the same where one of them
#: passed through bfloat16.
EXACT, ROUNDED = 1e-6, 4e-3


@dataclass(frozen=True)
class FieldSource:
    """One number or list of a configuration.

    Attributes:
        name: The name of the port's configuration field.
        read: Expression over `hf` that reads it.
        values: Its value in each twin.
        annotation: Its Python type as written in the port.
    """

    name: str
    read: str
    values: tuple[Any, ...]
    annotation: str


@dataclass(frozen=True)
class Expr:
    """A number of the port's source: text over `config.`, and the fields it reads."""

    text: str
    fields: tuple[str, ...]
    values: tuple[Number, ...] = field(compare=False)
    atom: bool = True

    def __repr__(self) -> str:
        return self.text

    @property
    def operand(self) -> str:
        """The text as an operand of another expression."""
        return self.text if self.atom else f"({self.text})"


def _close(a: Number, b: Number, tolerance: float) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-30)


class Lifter:
    """Finds the expression behind the values that a literal has in the twins."""

    def __init__(self, fields: Sequence[FieldSource]) -> None:
        self.fields = list(fields)
        numbers = [f for f in fields if all(_is_number(v) for v in f.values)]
        self.varying = [self._atom(f) for f in numbers if len(set(f.values)) > 1]
        if len({f.name for f in numbers}) != len(numbers):
            raise MaxportError("two configuration keys have one name", fix="report the model")
        # Ids of special tokens are no sizes: they stand for themselves or for nothing.
        self.token_ids = [e for e in self.varying if e.fields[0].endswith("token_id")]
        self.varying = [e for e in self.varying if e not in self.token_ids]
        ints = [e for e in self.varying if all(isinstance(v, int) for v in e.values)]
        self.ints = sorted(ints, key=lambda e: _rank(e.fields[0]))
        self.found: dict[tuple[Number, ...], Expr] = {}
        self.shares = False

    @staticmethod
    def _atom(source: FieldSource) -> Expr:
        return Expr(f"config.{source.name}", (source.name,), source.values)

    def lift(self, values: tuple[Number, ...], where: str) -> Expr | Number:
        """The literal itself where all twins agree, else its expression.

        Raises:
            MaxportError: No expression over the configuration gives these values.
        """
        if all(_close(v, values[0], 1e-12) for v in values):
            return values[0]
        if values not in self.found:
            expr = self._known(values) or next(self.matches(values), None)
            if expr is None:
                raise MaxportError(
                    f"the number {values[0]} (in other sizes {', '.join(map(str, values[1:]))}) "
                    "is no known expression over the configuration",
                    where=where,
                    fix="report the model; a number that depends on its size must be explained",
                )
            self.found[values] = expr
        return self.found[values]

    def _known(self, values: tuple[Number, ...]) -> Expr | None:
        """An expression found for a literal that is known at more sizes than this one."""
        for longer, expr in self.found.items():
            if len(longer) > len(values) and longer[: len(values)] == values:
                return expr
        return None

    def matches(self, values: tuple[Number, ...]) -> Iterator[Expr]:
        """Every expression that gives these values, the simplest first."""
        whole = all(isinstance(v, int) for v in values)
        # A share of a size is a rotary width: even. Smaller numbers would fit many shares.
        self.shares = whole and all(v >= 4 and v % 2 == 0 for v in values)
        candidates = self._int_candidates() if whole else self._float_candidates()
        for tolerance in (EXACT,) if whole else (EXACT, ROUNDED):
            for expr in candidates():
                if all(_close(a, b, tolerance) for a, b in zip(expr.values, values, strict=False)):
                    yield expr

    # candidates, the simplest first

    def _combine(
        self, text: str, parts: Sequence[Expr], f: Callable[..., Number], *, atom: bool = False
    ) -> Expr | None:
        try:
            values = tuple(f(*vs) for vs in zip(*(p.values for p in parts), strict=True))
        except (ArithmeticError, ValueError):
            return None
        if any(isinstance(v, complex) for v in values):
            return None
        names = tuple(dict.fromkeys(n for p in parts for n in p.fields))
        return Expr(text, names, values, atom)

    def _int_candidates(self) -> Callable[[], Iterator[Expr]]:
        def generate() -> Iterator[Expr]:
            ints = self.ints
            yield from ints
            if self.shares:
                yield from self._parts()
            yield from self._scaled(ints)
            yield from self._pairs(ints)
            yield from self._triples(ints)
            yield from self._shifted(ints)
            yield from self.token_ids

        return generate

    def _scaled(self, ints: Sequence[Expr]) -> Iterator[Expr]:
        for a in ints:
            for k in (2, 3, 4, 8):
                yield from _some(self._combine(f"{k} * {a}", [a], lambda x, k=k: k * x))
                yield from _some(
                    self._combine(f"{a} // {k}", [a], lambda x, k=k: _exact_quotient(x, k))
                )
            for k, m in ((3, 4), (3, 2)):
                yield from _some(
                    self._combine(
                        f"{k} * {a} // {m}", [a], lambda x, k=k, m=m: _exact_quotient(k * x, m)
                    )
                )

    def _shifted(self, ints: Sequence[Expr]) -> Iterator[Expr]:
        for a in ints:
            for k in (1, 2):
                yield from _some(self._combine(f"{a} + {k}", [a], lambda x, k=k: x + k))
                yield from _some(self._combine(f"{a} - {k}", [a], lambda x, k=k: x - k))
                text = f"{a} // 2 - {k}"
                yield from _some(self._combine(text, [a], lambda x, k=k: x // 2 - k))

    def _pairs(self, ints: Sequence[Expr]) -> Iterator[Expr]:
        for a, b in itertools.combinations(sorted(ints, key=_counts_first), 2):
            yield from _some(self._combine(f"{a} * {b}", [a, b], lambda x, y: x * y))
        for a, b in itertools.permutations(ints, 2):
            yield from _some(self._combine(f"{a} // {b}", [a, b], _exact_quotient))
            if a.text < b.text:
                yield from _some(self._combine(f"{a} + {b}", [a, b], lambda x, y: x + y))
            yield from _some(self._combine(f"{a} - {b}", [a, b], lambda x, y: x - y))
        for a, b in itertools.permutations(ints, 2):
            for k in (1, 2):
                text = f"({a} + {k}) * {b}"
                yield from _some(self._combine(text, [a, b], lambda x, y, k=k: (x + k) * y))

    def _parts(self) -> Iterator[Expr]:
        floats = [e for e in self.varying if all(0 < v < 1 for v in e.values)]
        for a, b in itertools.product(self.ints, floats):
            yield from _some(
                self._combine(f"int({a} * {b})", [a, b], lambda x, y: int(x * y), atom=True)
            )
        for (a, c), b in itertools.product(itertools.permutations(self.ints, 2), floats):
            text = f"int({a} // {c} * {b})"
            yield from _some(
                self._combine(text, [a, c, b], lambda x, y, z: int(x // y * z), atom=True)
            )

    def _triples(self, ints: Sequence[Expr]) -> Iterator[Expr]:
        for a, b, c in itertools.permutations(ints, 3):
            parts = [a, b, c]
            text = f"({a} + 2 * {b}) * {c}"
            yield from _some(self._combine(text, parts, lambda x, y, z: (x + 2 * y) * z))
            yield from _some(
                self._combine(f"{a} + 2 * {b} * {c}", parts, lambda x, y, z: x + 2 * y * z)
            )
            if a.text < b.text:
                yield from _some(
                    self._combine(f"({a} + {b}) * {c}", parts, lambda x, y, z: (x + y) * z)
                )
                yield from _some(
                    self._combine(f"{a} * {b} // {c}", parts, lambda x, y, z: x * y // z)
                )
                yield from _some(
                    self._combine(f"2 * {a} * {b} + {c}", parts, lambda x, y, z: 2 * x * y + z)
                )
        for a, b in itertools.combinations(ints, 2):
            for k in (2, 3, 4):
                yield from _some(
                    self._combine(f"{k} * {a} * {b}", [a, b], lambda x, y, k=k: k * x * y)
                )
        for a, b in itertools.permutations(ints, 2):
            for k in (2, 3):
                text = f"({a} // {b} + {k}) * {b}"
                yield from _some(
                    self._combine(text, [a, b], lambda x, y, k=k: (_exact_quotient(x, y) + k) * y)
                )
            yield from _some(
                self._combine(f"{a} // {b} + 2", [a, b], lambda x, y: _exact_quotient(x, y) + 2)
            )

    def _float_candidates(self) -> Callable[[], Iterator[Expr]]:
        def generate() -> Iterator[Expr]:
            for a in self.varying:
                yield a
            for a in self.varying:
                yield from self._float_forms(a)
            for a, b in itertools.permutations(self.varying, 2):
                yield from self._float_pairs(a, b)

        return generate

    def _float_forms(self, a: Expr) -> Iterator[Expr]:
        yield from _some(self._combine(f"{a.operand} ** -0.5", [a], lambda x: x**-0.5))
        yield from _some(self._combine(f"{a.operand} ** 0.5", [a], lambda x: x**0.5))
        yield from _some(self._combine(f"1.0 / {a.operand}", [a], lambda x: 1 / x))
        yield from _some(self._combine(f"-{a.operand}", [a], lambda x: -x))
        for k in (2, 4, 0.5):
            yield from _some(self._combine(f"{k} * {a.operand}", [a], lambda x, k=k: k * x))

    def _float_pairs(self, a: Expr, b: Expr) -> Iterator[Expr]:
        two = [a, b]
        yield from _some(self._combine(f"{a} * {b}", two, lambda x, y: x * y))
        yield from _some(self._combine(f"{a} / {b}", two, lambda x, y: x / y))
        yield from _some(
            self._combine(f"({a} // {b}) ** -0.5", two, lambda x, y: _exact_quotient(x, y) ** -0.5)
        )
        yield from _some(self._combine(f"{a} * {b} ** -0.5", two, lambda x, y: x * y**-0.5))
        yield from _some(self._combine(f"{a} ** -0.5 / {b}", two, lambda x, y: x**-0.5 / y))
        yield from _some(self._combine(f"{a} / math.sqrt({b})", two, lambda x, y: x / math.sqrt(y)))


def _counts_first(expr: Expr) -> tuple[bool, str]:
    """A product reads `heads * width`, not `width * heads`."""
    return not expr.fields[0].startswith(("num_", "n_")), expr.text


def widest(sizes: Sequence[Expr | Number]) -> Expr | Number:
    """The largest of several sizes, as one expression."""
    if len(sizes) == 1:
        return sizes[0]
    exprs = [s for s in sizes if isinstance(s, Expr)]
    columns = [s.values if isinstance(s, Expr) else itertools.repeat(s) for s in sizes]
    return Expr(
        f"max({', '.join(map(repr, sizes))})",
        tuple(dict.fromkeys(name for e in exprs for name in e.fields)),
        tuple(max(column) for column in zip(*columns, strict=False)),
    )


def _rank(name: str) -> int:
    """Sizes that make up shapes come first: heads, then widths, then everything else."""
    if "head" in name:
        return 0
    wide = ("hidden", "embd", "d_model", "intermediate", "ffn", "inner", "vocab", "position")
    return 1 if any(word in name for word in wide) else 2


def _some(expr: Expr | None) -> Iterator[Expr]:
    if expr is not None:
        yield expr


def _exact_quotient(x: Number, y: Number) -> Number:
    if y == 0 or not isinstance(x, int) or not isinstance(y, int) or x % y:
        raise ArithmeticError
    return x // y


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
