"""Every number and per-layer list of a configuration, with how transformers code reads it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from transformers import PreTrainedConfig

from maxport.emit.expr import FieldSource
from maxport.emit.spec import FixedKey

#: Keys that say how a checkpoint is run or was made, not what it computes.
_IGNORED = {"_name_or_path", "architectures", "dtype", "transformers_version", "model_type"}


def _entries(config: Any, read: str, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """(field name, expression over `hf`, value) of every leaf."""
    items = config.to_dict().items() if hasattr(config, "to_dict") else config.items()
    for key, value in items:
        if key in _IGNORED or not isinstance(key, str):
            continue
        if hasattr(config, "to_dict"):
            inner, text = getattr(config, key, value), f"{read}.{key}"
        else:
            inner, text = value, f'{read}["{key}"]'
        nested = isinstance(inner, dict) or hasattr(inner, "to_dict")
        if nested:
            shared = key in ("rope_parameters", "rope_scaling")
            yield from _entries(inner, text, prefix if shared else f"{prefix}{key}_")
        else:
            yield f"{prefix}{key}", text, inner


def _annotation(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, list):
        inner = _annotation(value[0]) if value else "int"
        return f"list[{inner}]"
    return type(value).__name__


def _aliases(config: PreTrainedConfig) -> dict[str, str]:
    """transformers' common names by the model's own, such as `hidden_size` for `n_embd`."""
    return {own: common for common, own in (config.attribute_map or {}).items()}


def _table(config: PreTrainedConfig) -> dict[str, tuple[str, Any]]:
    """(expression, value) by field name; a rope key that is also a key of its own gets a prefix."""
    table: dict[str, tuple[str, Any]] = {}
    entries = sorted(_entries(config, "hf", ""), key=lambda e: "[" in e[1])
    for name, text, value in entries:
        table[name if name not in table else f"rope_{name}"] = (text, value)
    return table


def field_sources(configs: Sequence[PreTrainedConfig]) -> list[FieldSource]:
    """The fields that a literal may be tied to, in the order of the configuration.

    Args:
        configs: The twins' configurations, of the same model at several sizes.
    """
    tables = [_table(c) for c in configs]
    aliases = _aliases(configs[0])
    out: list[FieldSource] = []
    for name, (text, value) in tables[0].items():
        if not all(name in t for t in tables) or not name.isidentifier():
            continue
        values = tuple(t[name][1] for t in tables)
        if not isinstance(value, int | float | list) or any(v is None for v in values):
            continue
        common = aliases.get(name, name)
        read = f"hf.{common}" if common != name else text
        out.append(FieldSource(common, read, values, _annotation(value)))
    return out + _derived(configs, {f.name for f in out})


def fixed_keys(config: PreTrainedConfig, reads: Collection[str]) -> list[FixedKey]:
    """Flags, names and absent values that decide what the model computes.

    Args:
        config: The checkpoint's configuration.
        reads: Keys that the model's code reads, nested ones with a dot.
    """
    generic = {*PreTrainedConfig().to_dict(), "use_cache"}
    found = []
    for text, value in _table(config).values():
        key = re.sub(r'\["(\w+)"\]', r".\1", text.removeprefix("hf."))
        last = key.rpartition(".")[2]
        if last in generic or last.endswith("token_id") or not isinstance(value, bool | str | None):
            continue
        if key in reads or last == "rope_type":
            found.append(FixedKey(key, text, value))
    return found


def _derived(configs: Sequence[PreTrainedConfig], present: set[str]) -> list[FieldSource]:
    """Sizes that transformers' own code computes where config.json leaves them out."""
    derived = []
    heads_known = {"hidden_size", "num_attention_heads"} <= present
    if "head_dim" not in present and heads_known:
        values = tuple(c.hidden_size // c.num_attention_heads for c in configs)
        read = "hf.hidden_size // hf.num_attention_heads"
        derived.append(FieldSource("head_dim", read, values, "int"))
    return derived
