"""Shrink any transformers config to a tiny twin of the same structure."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from maxport.errors import MaxportError
from maxport.twin.layers import LayerPlan, plan_layers
from maxport.twin.numbers import FieldShrinker, Options
from maxport.twin.roles import role_of
from maxport.twin.values import HeadPlan, head_plans

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SIZES = 3
_COMPUTED = {"transformers_version", "model_type", "architectures", "dtype", "torch_dtype"}
# A config class may leave a size empty that its model cannot do without.
_FILL = (
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
)


def twin_config(
    config: PreTrainedConfig,
    size: int = 0,
    *,
    window: int | None = None,
    layers: int | None = None,
    head_dim: int | None = None,
) -> PreTrainedConfig:
    """A tiny config of the same structure as `config`, of a class that builds and runs.

    Kept: layer kinds (one layer of each, two if all are alike), optional parts, GQA / MQA / MHA,
    tied heads, rope types, flags. Changed: every size and every optional scalar; all of them
    differ from each other and between sizes. Size constraints are not known by model name:
    candidates are tried until the model builds and runs at all three sizes, with the same
    parameters up to shape.

    Args:
        config: A transformers config, of a real checkpoint or a class default.
        size: 0, 1 or 2.
        window: Sliding window to use instead of one of 5 to 7; the twins get `window + size`.
        layers: Keep at least this many layers.
        head_dim: Force this head_dim (GPU kernels accept few values); sizes then share it.

    Raises:
        MaxportError: If no candidate builds and runs; says what the last ones failed with.
    """
    if size not in range(SIZES):
        raise ValueError(f"size must be 0, 1 or 2, not {size}")
    key = (_fingerprint(config), window, layers, head_dim)
    if key not in _CACHE:
        _CACHE[key] = _search(config, window, layers, head_dim)
    return copy.deepcopy(_CACHE[key][size])


_CACHE: dict[tuple[Any, ...], list[Any]] = {}


def _fingerprint(config: PreTrainedConfig) -> str:
    values = {**config.to_dict(), "is_decoder": getattr(config, "is_decoder", None)}
    values["_source"] = getattr(config, "_name_or_path", "")
    return type(config).__qualname__ + json.dumps(values, sort_keys=True, default=repr)


def _search(
    config: PreTrainedConfig, window: int | None, layers: int | None, head_dim: int | None
) -> list[PreTrainedConfig]:
    from maxport.twin.probe import structure

    failures: list[str] = []
    for options in _candidates(config, window, layers, head_dim):
        try:
            twins = [shrink(config, options, size) for size in range(SIZES)]
            shapes = [structure(t) for t in twins]
        except Exception as error:  # any failure of a candidate only rules that candidate out
            failures.append(f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
            continue
        if all(s == shapes[0] for s in shapes[1:]):
            return twins
        failures.append("the three sizes have different parameters")
    unique = list(dict.fromkeys(failures))
    raise MaxportError(
        f"no tiny twin of {type(config).__name__} builds and runs",
        where="; ".join(unique[:4]),
        fix="check that the model itself runs in transformers with this config",
    )


def _candidates(
    config: PreTrainedConfig, window: int | None, layers: int | None, head_dim: int | None
) -> Iterator[Options]:
    plans = list(_head_plans(config, head_dim))
    for fill in (False, True):
        for floats in (True, False):
            for unknown in (True, False):
                for plan in plans:
                    yield Options(plan, window, layers, floats, unknown, fill)
    for more in (6, 12):  # layers that share weights come at least in pairs
        if more > (layers or 0):
            yield Options(plans[0], window, more, True, True, False)


def _head_plans(config: PreTrainedConfig, head_dim: int | None) -> Iterator[HeadPlan]:
    values = _attention_values(config)
    by_role: dict[str, Any] = {}
    for name, value in values.items():
        role = role_of(name)
        if role and (role not in by_role or by_role[role] is None):
            by_role[role] = value
    heads = by_role.get("heads")
    latent = values.get("kv_lora_rank") is not None
    kv = "full"
    if "kv_heads" in by_role and not latent:
        kv = "single" if by_role["kv_heads"] == 1 else "grouped"
    return head_plans(
        heads if isinstance(heads, int) else 8,
        kv,
        explicit=isinstance(by_role.get("head_dim"), int) and not latent,
        alibi=any("alibi" in k and v for k, v in values.items()),
        head_dim=head_dim,
    )


def _attention_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of the decoder's config, with those of a nested attention config."""
    text = config.get_text_config(decoder=True)
    values = {**fields_of(text)}
    for value in list(values.values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            nested = fields_of(value)
            values.update({k: v for k, v in nested.items() if role_of(k) == "kv_heads"})
            values.update({k: v for k, v in nested.items() if "alibi" in k})
    return values


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What to pass to the config's class to get the config again: fields and unknown extras."""
    names = _init_names(type(config))
    values: dict[str, Any] = {}
    for name in names:
        try:
            values[name] = getattr(config, name)
        except AttributeError:
            continue
    try:
        computed = set(vars(type(config)(**copy.deepcopy(values))))
    except Exception:
        computed = set()
    for name, value in vars(config).items():
        if not name.startswith("_") and name not in names and name not in computed:
            values[name] = value
    return {k: v for k, v in values.items() if k not in _COMPUTED}


def _init_names(cls: type) -> list[str]:
    names = [f.name for f in dataclasses.fields(cls) if f.init] if _is_dataclass(cls) else []
    if "__init__" in vars(cls):
        parameters = inspect.signature(cls).parameters.values()
        own = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        names = [*(n for n in own if n != "self"), *(n for n in names if n not in own)]
    return list(dict.fromkeys(names))


def _is_dataclass(cls: type) -> bool:
    return dataclasses.is_dataclass(cls)


def shrink(
    config: PreTrainedConfig, options: Options, size: int, parent: FieldShrinker | None = None
) -> PreTrainedConfig:
    """One candidate twin at one size; may raise whatever the config class raises."""
    values = fields_of(config)
    canonical = {v: k for k, v in (getattr(config, "attribute_map", None) or {}).items()}
    plan: LayerPlan = plan_layers(values, canonical, options.layers)
    shrinker = FieldShrinker(config, values, canonical, options, size, len(plan.kept), parent)
    new: dict[str, Any] = {}
    for name, value in values.items():
        if _is_config(value):
            new[name] = shrink(value, options, size, shrinker)
        elif name in plan.values:
            new[name] = shrinker.per_layer(name, plan.values[name])
        else:
            new[name] = shrinker.value(name, value)
    if options.fill:
        for name in _FILL:
            if name in new and new[name] is None:
                new[name] = shrinker.filled(name)
    twin = type(config)(**new)
    for name in ("architectures", "auto_map"):
        if getattr(config, name, None):
            setattr(twin, name, getattr(config, name))
    twin._name_or_path = getattr(config, "_name_or_path", "")
    return twin


def _is_config(value: object) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)
