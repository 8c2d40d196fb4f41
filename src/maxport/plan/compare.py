"""How far a model is from a donor, and what would have to change: an edit script between slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from maxport.plan.fingerprint import Fingerprint, Kind
from maxport.plan.slots import NORMS, Token

#: What writing one operation costs, in linear layers; an operation not listed is one plain op.
_OP_COST = {
    "attend": 3.0,
    "linear": 1.0,
    "rms_norm": 1.0,
    "layer_norm": 1.0,
    "rope": 1.0,
    "embedding": 1.0,
    "topk": 1.0,
    "branch": 1.0,
    "conv1d": 2.0,
    "convolution": 2.0,
    "tied head": 0.1,
    "shared norm": 0.2,
}
_PLAIN = 0.4
#: What changing one attribute of an operation costs; an attribute not listed costs as `kind`.
_ATTR_COST = {
    "mask": 1.0,
    "ALiBi": 1.5,
    "sinks": 1.0,
    "scale": 0.2,
    "softcap": 0.5,
    "grouped": 0.2,
    "kind": 0.5,
    "bias": 0.2,
    "fused": 0.3,
    "stored transposed": 0.2,
    "weight": 0.4,
    "weight + 1": 0.4,
    "rounds before the weight": 0.1,
    "over": 0.5,
    "pairs": 0.5,
    "partial": 0.3,
    "backwards": 0.3,
    "scaled": 0.2,
    "in float32": 0.1,
    "frequencies by kind of layer": 0.3,
    "reads": 0.8,
    "adds to": 0.4,
    "of": 1.0,
}
_OTHER_NORM = 0.7
#: Leaving out what a donor has costs this share of writing it.
_REMOVAL = 0.4
#: Leaving out a whole kind of layer.
_UNUSED_KIND = 0.3
#: What an attention or an operation is without the feature; going there is a removal.
_NEUTRAL = (None, "causal", "head_dim**-0.5")


@dataclass(frozen=True)
class Delta:
    """One difference between a model and its donor.

    Attributes:
        component: The slot it is in ("attention query").
        reference: Class and source lines of the Hugging Face model, "" if it lacks the operation.
        model: What the model does there, "nothing" if it lacks it.
        donor: What the donor's own Hugging Face class does there.
        change: What to do about it.
        kinds: Which kinds of layers it concerns; empty for all.
        cost: Size of the change, in linear layers to write.
    """

    component: str
    reference: str
    model: str
    donor: str
    change: str
    kinds: tuple[str, ...]
    cost: float


@dataclass(frozen=True)
class Comparison:
    """A model against one donor: the edit script and its size.

    `distance` is the sum of the deltas' costs; `shared` the share of the model (by cost) that the
    donor already has; `names` the share of the model's weight names that the donor uses too.
    """

    distance: float
    shared: float
    names: float
    deltas: tuple[Delta, ...]


def compare(model: Fingerprint, donor: Fingerprint) -> Comparison:
    """The edit script from `donor` to `model`, each difference once however many layers have it."""
    found: dict[tuple[str, str], _Change] = {}
    used: set[str] = set()
    for kind in model.kinds:
        nearest = min(donor.kinds, key=lambda other: _distance(kind, other), default=Kind("", {}))
        used.add(nearest.name)
        _collect(found, kind, nearest)
    _collect(found, model.outer, donor.outer)
    every = {kind.name for kind in model.kinds}
    deltas = [change.delta(every, model.outer.name) for change in found.values()]
    deltas += [_unused(kind) for kind in donor.kinds if kind.name not in used]
    distance = sum(delta.cost for delta in deltas)
    whole = _whole(model)
    names = set(model.weights) & set(donor.weights)
    return Comparison(
        distance=round(distance, 3),
        shared=round(max(0.0, 1.0 - distance / whole), 4) if whole else 0.0,
        names=round(len(names) / max(len(model.weights), 1), 4),
        deltas=tuple(sorted(deltas, key=lambda d: -d.cost)),
    )


def _unused(kind: Kind) -> Delta:
    """A kind of layer that only the donor has."""
    parts = [slot.removesuffix(" wiring") for slot in kind.slots if slot.endswith(" wiring")]
    what = f"layers of {' and '.join(parts) or 'another kind'}"
    change = "leave out this kind of layer"
    return Delta("layers", "", "nothing", what, change, (), _UNUSED_KIND)


@dataclass
class _Change:
    """One change of the edit script with the kinds of layers that need it and how often."""

    slot: str
    old: Token | None
    new: Token | None
    advice: str
    times: dict[str, int]

    def delta(self, every: set[str], outer: str) -> Delta:
        times, advice = max(self.times.values()), self.advice
        all_kinds = set(self.times) in (every, {outer})
        return Delta(
            component=self.slot,
            reference=self.new.place if self.new else "",
            model=describe(self.new),
            donor=describe(self.old)
            + (f" [{self.old.place}]" if self.old and self.old.place else ""),
            change=advice if times == 1 else f"{advice} ({times} times)",
            kinds=() if all_kinds else tuple(self.times),
            cost=round(times * _change_cost(self.old, self.new), 3),
        )


def _collect(found: dict[tuple[str, str], _Change], model: Kind, donor: Kind) -> None:
    for slot, old, new, after in _edits(model, donor):
        advice = _advice(old, new) + after
        change = found.setdefault((slot, advice), _Change(slot, old, new, advice, {}))
        change.times[model.name] = change.times.get(model.name, 0) + 1


def _whole(model: Fingerprint) -> float:
    """Cost of writing the whole model: each kind's operations once."""
    tokens: dict[tuple[str, int, Token], None] = {}
    for kind in (*model.kinds, model.outer):
        for slot, row in kind.slots.items():
            tokens |= {(slot, index, token): None for index, token in enumerate(row)}
    return sum(_cost(token) for _, _, token in tokens)


Edit = tuple[str, Token | None, Token | None, str]


def _distance(a: Kind, b: Kind) -> float:
    return sum(_change_cost(old, new) for _, old, new, _ in _edits(a, b))


def _edits(model: Kind, donor: Kind) -> list[Edit]:
    """(slot, donor's token, model's token, where) of every difference; None where one lacks it."""
    found: list[Edit] = []
    for slot in dict.fromkeys([*model.slots, *donor.slots]):
        script = _script(donor.slots.get(slot, ()), model.slots.get(slot, ()))
        before = ""
        for old, new in script:
            if old != new:
                found.append((slot, old, new, "" if old else before))
            if new is not None:
                before = f" after the {_WORDS.get(new.op, new.op)}"
    return found


def _script(old: Sequence[Token], new: Sequence[Token]) -> list[tuple[Token | None, Token | None]]:
    """The cheapest alignment of two token lists (Levenshtein with operation costs)."""
    rows, columns = len(old) + 1, len(new) + 1
    best = [[0.0] * columns for _ in range(rows)]
    for i in range(1, rows):
        best[i][0] = best[i - 1][0] + _change_cost(old[i - 1], None)
    for j in range(1, columns):
        best[0][j] = best[0][j - 1] + _cost(new[j - 1])
    for i in range(1, rows):
        for j in range(1, columns):
            best[i][j] = min(
                best[i - 1][j] + _change_cost(old[i - 1], None),
                best[i][j - 1] + _cost(new[j - 1]),
                best[i - 1][j - 1] + _change_cost(old[i - 1], new[j - 1]),
            )
    return _walk_back(best, old, new)


def _walk_back(
    best: Sequence[Sequence[float]], old: Sequence[Token], new: Sequence[Token]
) -> list[tuple[Token | None, Token | None]]:
    pairs: list[tuple[Token | None, Token | None]] = []
    i, j = len(old), len(new)
    while i or j:
        if i and j:
            both = best[i - 1][j - 1] + _change_cost(old[i - 1], new[j - 1])
            if abs(best[i][j] - both) < 1e-9:
                pairs.append((old[i - 1], new[j - 1]))
                i, j = i - 1, j - 1
                continue
        if i and abs(best[i][j] - best[i - 1][j] - _change_cost(old[i - 1], None)) < 1e-9:
            pairs.append((old[i - 1], None))
            i -= 1
        else:
            pairs.append((None, new[j - 1]))
            j -= 1
    return pairs[::-1]


def _cost(token: Token) -> float:
    if token.op == "formula":
        return _PLAIN * _terms(token).total()
    return _OP_COST.get(token.op, _PLAIN)


def _terms(token: Token) -> Counter[str]:
    """The operations of a formula."""
    return Counter(str(token.get("of")).split(", "))


def _formula_change(old: Token, new: Token) -> tuple[list[str], list[str]]:
    """Operations that a donor's formula has too many, and that it lacks."""
    a, b = _terms(old), _terms(new)
    return sorted((a - b).elements()), sorted((b - a).elements())


def _change_cost(old: Token | None, new: Token | None) -> float:
    """Cost of making `new` out of `old`; removing is cheaper than writing."""
    if old is None or new is None:
        return _cost(new) if new else _REMOVAL * _cost(old) if old else 0.0
    if old == new:
        return 0.0
    if old.op == new.op == "formula":
        gone, more = _formula_change(old, new)
        return _PLAIN * (len(more) + _REMOVAL * len(gone))
    if old.op == new.op:
        a, b = dict(old.attrs), dict(new.attrs)
        return sum(
            _attr_cost(name, b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)
        )
    if old.op in NORMS and new.op in NORMS:
        return _OTHER_NORM
    return _REMOVAL * _cost(old) + _cost(new)


def _attr_cost(name: str, new: object) -> float:
    cost = _ATTR_COST.get(name, 0.5)
    return _REMOVAL * cost if new in _NEUTRAL else cost


def _advice(old: Token | None, new: Token | None) -> str:
    if old is None:
        return f"add {describe(new)}"
    if new is None:
        return f"remove {describe(old)}"
    if old.op == new.op == "formula":
        gone, more = _formula_change(old, new)
        steps = [
            f"{word} {', '.join(ops)}" for word, ops in (("remove", gone), ("add", more)) if ops
        ]
        return "formula: " + "; ".join(steps)
    if old.op != new.op:
        return f"replace {describe(old)} by {describe(new)}"
    a, b = dict(old.attrs), dict(new.attrs)
    changed = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    steps = [f"{name}: {_word(a.get(name))} -> {_word(b.get(name))}" for name in changed]
    return f"{_WORDS.get(new.op, new.op)}: " + "; ".join(steps)


def _word(value: object) -> str:
    return {None: "no", True: "yes"}.get(value, str(value))  # type: ignore[call-overload, no-any-return]


_WORDS = {
    "attend": "attention",
    "branch": "residual branch",
    "linear": "projection",
    "rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    "rope": "rotary embedding",
    "tied head": "head that uses the embedding's weight",
    "shared norm": "the same norm as another branch",
}


def describe(token: Token | None) -> str:
    """A token in words: "RMSNorm (weight, over each head)"; "nothing" for None."""
    if token is None:
        return "nothing"
    parts = [name if value is True else f"{name} {value}" for name, value in token.attrs]
    word = _WORDS.get(token.op, token.op)
    return f"{word} ({', '.join(parts)})" if parts else word
