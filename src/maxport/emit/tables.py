"""Constants that the model computes from its configuration: frequencies, slopes, sinusoids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxport.emit.expr import Expr, Lifter, Number
from maxport.errors import MaxportError
from maxport.idioms.rotary import Rotation

_TABLE = 2e-5


@dataclass(frozen=True)
class Rope:
    """A rotary embedding whose table is one call over the configuration.

    Attributes:
        kind: The frequencies' formula: `default`, `linear`, `llama3`, `yarn`, `longrope`, ...
        width: Rotated columns.
        offset: First rotated column.
        interleaved: Whether pairs are adjacent columns.
        sign: -1 where it runs backwards.
        arguments: The formula's keyword arguments, in order.
        factor: Length of a rotated unit vector: a number, an expression, or the name of a formula
            for it with its arguments.
    """

    kind: str
    width: Expr | Number
    offset: Expr | Number
    interleaved: bool
    sign: int
    arguments: tuple[tuple[str, Expr | Number], ...]
    factor: Any = 1.0

    @property
    def table(self) -> tuple[Any, ...]:
        """What two rotations must share to share a table."""
        return self.kind, self.width, self.sign, self.arguments, self.factor


@dataclass(frozen=True)
class Slopes:
    """ALiBi slopes: one per head, a geometric sequence."""

    heads: Expr | Number
    bias_max: Expr | Number


def default_frequencies(width: int, theta: float) -> np.ndarray:
    """theta ** (-2i / width), radians per position, (width / 2,)."""
    out: np.ndarray = 1.0 / theta ** (np.arange(0, width, 2) / width)
    return out


def llama3_frequencies(
    width: int, theta: float, factor: float, low: float, high: float, original: float
) -> np.ndarray:
    """Llama 3.1's scaling (transformers `_compute_llama3_parameters`)."""
    base = default_frequencies(width, theta)
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    mixed = (1 - smooth) * base / factor + smooth * base
    scaled = np.where(wavelength > original / low, base / factor, base)
    middle = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(middle, mixed, scaled)


def yarn_frequencies(
    width: int,
    theta: float,
    factor: float,
    fast: float,
    slow: float,
    original: float,
    truncate: bool,
) -> np.ndarray:
    """YaRN (transformers `_compute_yarn_parameters`)."""
    base = default_frequencies(width, theta)

    def dim(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim(fast), dim(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    out: np.ndarray = base / factor * ramp + base * (1 - ramp)
    return out


def yarn_attention_factor(factor: float, mscale: float = 1.0, all_dim: float = 0.0) -> float:
    """YaRN's length of a rotated vector where the configuration gives none."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(all_dim) if all_dim else scale(mscale)


def longrope_frequencies(width: int, theta: float, factors: Sequence[float]) -> np.ndarray:
    """LongRoPE: every pair slowed down by a factor of its own (`_compute_longrope_parameters`)."""
    out: np.ndarray = default_frequencies(width, theta) / np.asarray(factors)
    return out


def longrope_attention_factor(longest: float, original: float) -> float:
    """LongRoPE's length of a rotated vector where the configuration gives none."""
    stretch = longest / original
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0


def proportional_frequencies(
    width: int, theta: float, partial: float, factor: float = 1.0
) -> np.ndarray:
    """The first share of the pairs turn (`_compute_proportional_rope_parameters`)."""
    turning = int(partial * width // 2)
    base = 1.0 / theta ** (np.arange(0, 2 * turning, 2) / width)
    out: np.ndarray = np.concatenate([base, np.zeros(width // 2 - turning)]) / factor
    return out


Evaluate = Callable[..., np.ndarray]


@dataclass
class _Formula:
    kind: str
    keys: tuple[str, ...]
    build: Evaluate


_FORMULAS = (
    _Formula("default", ("rope_theta",), lambda w, t: default_frequencies(w, t)),
    _Formula("linear", ("rope_theta", "factor"), lambda w, t, f: default_frequencies(w, t) / f),
    _Formula(
        "llama3",
        (
            "rope_theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        llama3_frequencies,
    ),
    _Formula(
        "yarn",
        (
            "rope_theta",
            "factor",
            "beta_fast",
            "beta_slow",
            "original_max_position_embeddings",
            "truncate",
        ),
        yarn_frequencies,
    ),
    _Formula(
        "longrope",
        ("rope_theta", "short_factor", "long_factor", "original_max_position_embeddings"),
        lambda w, t, short, long, original: longrope_frequencies(w, t, short),
    ),
)
_DEFAULTS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def lift_rope(lifter: Lifter, twins: tuple[Rotation, ...], where: str) -> Rope:
    """The formula behind the frequencies that the twins rotate by.

    Raises:
        MaxportError: No known formula gives them.
    """
    first = twins[0]
    width = lifter.lift(tuple(t.width for t in twins), where)
    offset = lifter.lift(tuple(t.offset for t in twins), where)
    if any((t.interleaved, t.sign) != (first.interleaved, first.sign) for t in twins):
        raise MaxportError("the rotary embedding differs between sizes", where=where)
    found = _formula(lifter, twins)
    if found is None:
        raise MaxportError(
            "the rotary frequencies follow none of the formulas default, linear, llama3, yarn, "
            "longrope and proportional",
            where=where,
            fix="report the model with its config.json",
        )
    kind, arguments = found
    factor = _factor(lifter, twins, kind, dict(arguments), where)
    return Rope(kind, width, offset, first.interleaved, first.sign, arguments, factor)


def _factor(
    lifter: Lifter, twins: tuple[Rotation, ...], kind: str, arguments: dict[str, Any], where: str
) -> Any:
    values = tuple(t.factor for t in twins)
    if all(abs(v - 1.0) < 1e-6 for v in values):
        return 1.0
    for name, formula, names in _FACTORS.get(kind, ()):
        found = _formula_factor(lifter, values, arguments, formula, names)
        if found:
            return (name, *found)
    return lifter.lift(values, where)


#: Formulas for the length of a rotated vector by kind: helper, function, configuration fields.
_FACTORS: dict[str, tuple[tuple[str, Callable[..., float], tuple[str, ...]], ...]] = {
    "yarn": (
        ("yarn_factor", yarn_attention_factor, ("factor",)),
        ("yarn_factor", yarn_attention_factor, ("factor", "mscale", "mscale_all_dim")),
    ),
    "longrope": (
        (
            "longrope_factor",
            longrope_attention_factor,
            ("max_position_embeddings", "original_max_position_embeddings"),
        ),
    ),
}


def _formula_factor(
    lifter: Lifter,
    values: tuple[float, ...],
    arguments: dict[str, Any],
    formula: Callable[..., float],
    names: tuple[str, ...],
) -> tuple[Any, ...]:
    """The formula's arguments if it gives `values`, else nothing."""
    by_name = {f.name: f for f in lifter.fields}
    chosen = []
    for name in names:
        source = by_name.get(name)
        if name in arguments:
            chosen.append(arguments[name])
        elif source is not None and all(isinstance(v, int | float) for v in source.values):
            chosen.append(Expr(f"config.{name}", (name,), source.values))
        else:
            return ()
    for index, value in enumerate(values):
        numbers = [c.values[index] if isinstance(c, Expr) else c for c in chosen]
        if abs(formula(*numbers) - value) > 1e-5:
            return ()
    return tuple(chosen)


def _groups(lifter: Lifter) -> list[dict[str, Expr]]:
    """The configuration's rope fields, one dict for each set that belongs together."""
    groups: dict[str, dict[str, Expr]] = {}
    for source in lifter.fields:
        path, _, key = source.read.rpartition("[")
        key = key.strip(']"')
        if "rope_parameters" in path and all(v is not None for v in source.values):
            expr = Expr(f"config.{source.name}", (source.name,), source.values)
            groups.setdefault(path, {})[key] = expr
    return list(groups.values())


def _formula(
    lifter: Lifter, twins: tuple[Rotation, ...]
) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    for group in _groups(lifter):
        for formula in _FORMULAS:
            arguments = {k: group.get(k, _DEFAULTS.get(k)) for k in formula.keys}
            if any(v is None for v in arguments.values()):
                continue
            if all(_agrees(formula, arguments, i, twin) for i, twin in enumerate(twins)):
                return formula.kind, tuple(arguments.items())
    return _proportional(lifter, twins) or _implied_theta(lifter, twins)


def _proportional(
    lifter: Lifter, twins: tuple[Rotation, ...]
) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    """Frequencies of which only the first pairs' are not zero."""
    if all(0.0 not in t.freqs for t in twins):
        return None
    for group in _groups(lifter):
        names = ("rope_theta", "partial_rotary_factor", *(("factor",) if "factor" in group else ()))
        if any(n not in group for n in names):
            continue
        formula = _Formula("proportional", names, proportional_frequencies)
        arguments = {n: group[n] for n in names}
        if all(_agrees(formula, arguments, i, t) for i, t in enumerate(twins)):
            return "proportional", tuple(arguments.items())
    return None


def _agrees(formula: _Formula, arguments: dict[str, Any], index: int, twin: Rotation) -> bool:
    numbers = [v.values[index] if isinstance(v, Expr) else v for v in arguments.values()]
    if any(isinstance(n, str) or n is None for n in numbers):
        return False
    table = formula.build(twin.width, *numbers)
    return table.shape == (len(twin.freqs),) and np.allclose(
        table, twin.freqs, rtol=_TABLE, atol=1e-9
    )


def _implied_theta(
    lifter: Lifter, twins: tuple[Rotation, ...]
) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    """A base that the configuration does not name in `rope_parameters`, such as GPT-J's 10000."""
    for theta in (10000.0, 500000.0, 1000000.0):
        formulas = [default_frequencies(t.width, theta) for t in twins]
        if all(np.allclose(f, t.freqs, rtol=1e-4) for f, t in zip(formulas, twins, strict=True)):
            return "default", (("rope_theta", theta),)
    thetas = []
    for twin in twins:
        if len(twin.freqs) < 2:
            return None
        theta = float(round(twin.freqs[1] ** (-twin.width / 2), 2))
        if not np.allclose(default_frequencies(twin.width, theta), twin.freqs, rtol=1e-4):
            return None
        thetas.append(theta)
    try:
        lifted = lifter.lift(tuple(thetas), "rotary embedding")
    except MaxportError:
        return None
    return "default", (("rope_theta", lifted),)


def alibi_slopes(heads: int, bias_max: float) -> np.ndarray:
    """ALiBi's slopes (MPT's and BLOOM's agree), one per head."""
    whole = 2 ** math.ceil(math.log2(heads))
    slopes: np.ndarray = 2.0 ** (-np.arange(1, whole + 1) * bias_max / whole)
    if whole == heads:
        return slopes
    odd: np.ndarray = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return odd


def lift_slopes(lifter: Lifter, twins: tuple[tuple[float, ...], ...], where: str) -> Slopes:
    """The formula behind the linear biases that the twins add to their scores.

    Raises:
        MaxportError: They are no ALiBi slopes.
    """
    bias = []
    for slopes in twins:
        whole = 2 ** math.ceil(math.log2(len(slopes)))
        guess = -math.log2(slopes[0]) * whole / (1 if whole == len(slopes) else 2)
        bias.append(round(guess, 4))
        if not np.allclose(alibi_slopes(len(slopes), bias[-1]), slopes, rtol=1e-3):
            raise MaxportError(
                "the bias on the scores is linear in the distance but its slopes are not ALiBi's",
                where=where,
                fix="port this layer by hand",
            )
    return Slopes(lifter.lift(tuple(len(s) for s in twins), where), lifter.lift(tuple(bias), where))
