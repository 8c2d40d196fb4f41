"""Which layers a twin keeps: one of every kind, in their order.

A layer's kind is what per-layer config values say about it: entries of lists as long as the model
is deep, membership in lists of layer indices, thresholds such as `first_k_dense_replace`, and
periods such as `attn_layer_period` where no list already says the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxport.twin.roles import role_of

MAX_PREFIX = 8


@dataclass
class LayerPlan:
    """The kept layers' old indices, and the per-layer config values rewritten for them."""

    kept: list[int]
    values: dict[str, Any] = field(default_factory=dict)


def depth_of(values: Mapping[str, Any], canonical: Mapping[str, str]) -> int | None:
    """The number of layers a config's values state, or None if no field states one."""
    names = [n for n in values if role_of(n, canonical.get(n)) == "layers" and _is_int(values[n])]
    names.sort(key=lambda n: (canonical.get(n, n) != "num_hidden_layers", n.startswith("encoder")))
    if names:
        depth: int = values[names[0]]
        return depth
    lists = [v for k, v in values.items() if _names_layers(k) and isinstance(v, list | tuple)]
    return max((len(v) for v in lists if all(isinstance(x, str) for x in v)), default=None)


def _names_layers(name: str) -> bool:
    return "layer" in name and name.endswith(("types", "type"))


def plan_layers(
    values: Mapping[str, Any], canonical: Mapping[str, str], layers: int | None = None
) -> LayerPlan:
    """Choose the layers of a twin and rewrite every per-layer value.

    Args:
        values: The real config's fields.
        canonical: Field name to common name (`attribute_map` reversed).
        layers: Keep at least this many layers; None keeps one of each kind, two if all are alike.
    """
    depth = depth_of(values, canonical)
    if not depth:
        return LayerPlan(kept=[])
    lists = {k: v for k, v in values.items() if _is_per_layer(k, v, depth)}
    runs = {k: _expand_runs(v) for k, v in values.items() if _is_runs(v)}
    lists.update({k: v for k, v in runs.items() if len(v) == depth})
    indices = {k: v for k, v in values.items() if k not in lists and _is_index_list(k, v, depth)}
    kinds = [_kind(i, depth, values, lists, indices) for i in range(depth)]
    periods = _active_periods(values, kinds, bool(lists))
    if periods:
        kinds = [(*k, *(_phase(i, p, o) for p, o in periods)) for i, k in enumerate(kinds)]
        kept = _prefix(kinds)
    else:
        kept = _first_of_each(kinds)
    kept = _extend(kept, depth, max(layers or 0, 2), prefix=bool(periods))
    plan = LayerPlan(kept)
    for name, old in lists.items():
        cut = type(old)(old[i] for i in kept)
        plan.values[name] = [[cut, 1]] if name in runs else cut
    for name, old in indices.items():
        plan.values[name] = type(old)(n for n, i in enumerate(kept) if i in old)
    for name, old in values.items():
        role = role_of(name, canonical.get(name))
        if _is_int(old) and old > 0:
            if role == "layer_index":
                plan.values[name] = sum(i < old for i in kept)
            elif role == "last_layer_index":
                plan.values[name] = max(sum(i <= old for i in kept) - 1, 0)
            elif role == "shared_kv_layers":
                plan.values[name] = sum(i >= depth - old for i in kept)
            elif role == "layers":
                plan.values[name] = len(kept)
        if role == "last_layer_index" and old == -1:
            plan.values[name] = -1
    return plan


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_per_layer(name: str, value: object, depth: int) -> bool:
    if not isinstance(value, list | tuple) or len(value) != depth:
        return False
    if _is_index_list(name, value, depth) and len(value) > 1 and "token" not in name:
        return False
    return depth > 2 or "layer" in name or "type" in name


def _is_cycle(name: str, value: object, depth: int) -> bool:
    """Whether `value` is a pattern of layer kinds that repeats over the depth."""
    if not isinstance(value, list | tuple) or not 1 < len(value) < depth:
        return False
    named = name.endswith(("types", "type", "pattern"))
    return named and all(isinstance(kind, str) for kind in value)


def _is_runs(value: object) -> bool:
    """Whether `value` is a run-length per-layer list: [[[kind, kind], repeats], ...]."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(run, list | tuple) and len(run) == 2 for run in value)
        and all(isinstance(run[0], list | tuple) and _is_int(run[1]) for run in value)
    )


def _expand_runs(value: Sequence[Any]) -> list[Any]:
    return [kind for kinds, repeats in value for kind in list(kinds) * repeats]


def _is_index_list(name: str, value: object, depth: int) -> bool:
    """Whether `value` lists layer indices: increasing integers below the depth."""
    if not isinstance(value, list | tuple) or not value or "token" in name:
        return False
    if not all(_is_int(v) and 0 <= v < depth for v in value):
        return False
    named = any(word in name for word in ("layer", "idx", "indices", "index"))
    return named and all(a < b for a, b in itertools.pairwise(value))


def _kind(
    index: int,
    depth: int,
    values: Mapping[str, Any],
    lists: Mapping[str, Sequence[Any]],
    indices: Mapping[str, Sequence[int]],
) -> tuple[Any, ...]:
    parts: list[Any] = [repr(v[index]) for v in lists.values()]
    parts += [index in v for v in indices.values()]
    for name, value in values.items():
        if not _is_int(value):
            continue
        role = role_of(name)
        if role == "layer_index":
            parts.append(index < value)
        elif role == "last_layer_index" and value >= 0:
            parts.append(index <= value)
        elif role == "shared_kv_layers" and value > 0:
            parts.append(index >= depth - value)
    return tuple(parts)


def _active_periods(
    values: Mapping[str, Any], kinds: Sequence[tuple[Any, ...]], listed: bool
) -> list[tuple[int, int | None]]:
    """(period, offset) of periods above 1 that the per-layer lists do not already express."""
    found: set[tuple[int, int | None]] = set()
    for name, value in values.items():
        if not listed and _is_cycle(name, value, len(kinds)):
            found.add((len(value), None))
        if role_of(name) == "period" and _is_int(value) and value > 1:
            offset = values.get(name.replace("period", "offset"))
            found.add((value, offset if _is_int(offset) else None))
    return sorted((f for f in found if not _expressed(f[0], kinds)), key=str)


def _phase(index: int, period: int, offset: int | None) -> int | bool:
    return index % period if offset is None else index % period == offset


def _expressed(period: int, kinds: Sequence[tuple[Any, ...]]) -> bool:
    """Whether some layer of each period differs in kind from the others, at a fixed offset."""
    for offset in range(period):
        inside = {k for i, k in enumerate(kinds) if i % period == offset}
        outside = {k for i, k in enumerate(kinds) if i % period != offset}
        if inside and outside and not inside & outside:
            return True
    return False


def _prefix(kinds: Sequence[tuple[Any, ...]]) -> list[int]:
    wanted, seen = set(kinds), set()
    for i, kind in enumerate(kinds):
        seen.add(kind)
        if seen == wanted or i + 1 == MAX_PREFIX:
            return list(range(i + 1))
    return list(range(len(kinds)))


def _first_of_each(kinds: Sequence[tuple[Any, ...]]) -> list[int]:
    first: dict[tuple[Any, ...], int] = {}
    for i, kind in enumerate(kinds):
        first.setdefault(kind, i)
    return sorted(first.values())


def _extend(kept: list[int], depth: int, least: int, *, prefix: bool) -> list[int]:
    """Add layers until there are `least`: from the front, and never more than the model has."""
    rest = [i for i in range(depth) if i not in kept]
    if not prefix and len(kept) == 1 and depth - 1 in rest:
        rest.remove(depth - 1)
        rest.insert(0, depth - 1)
    missing = max(min(least, depth) - len(kept), 0)
    return sorted(kept + rest[:missing])
