"""A checkpoint's tensors added up: by dtype, and by name with layer numbers left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from maxport.checkpoint.headers import TensorHeader

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class KeyPattern:
    """Tensors whose names differ only in numbers: `model.layers.*.mlp.up_proj.weight`.

    `indices` lists the numbers found in the first place where names differ, as ranges ("0-79").
    """

    pattern: str
    count: int
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    indices: str


def by_dtype(tensors: Iterable[TensorHeader]) -> dict[str, dict[str, int]]:
    """dtype -> {tensors, parameters, bytes}, the largest share first."""
    table: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        row = table.setdefault(tensor.dtype, {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += tensor.size
        row["bytes"] += tensor.nbytes
    return dict(sorted(table.items(), key=lambda item: -item[1]["bytes"]))


def patterns(tensors: Iterable[TensorHeader]) -> list[KeyPattern]:
    """Group tensors by name with every number replaced by `*`, in order of first appearance."""
    groups: dict[str, list[TensorHeader]] = {}
    for tensor in tensors:
        groups.setdefault(_NUMBER.sub("*", tensor.name), []).append(tensor)
    return [_pattern(name, group) for name, group in groups.items()]


def _pattern(name: str, group: list[TensorHeader]) -> KeyPattern:
    numbers = [[int(n) for n in _NUMBER.findall(tensor.name)] for tensor in group]
    return KeyPattern(
        pattern=name,
        count=len(group),
        dtypes=tuple(dict.fromkeys(tensor.dtype for tensor in group)),
        shapes=tuple(dict.fromkeys(tensor.shape for tensor in group)),
        nbytes=sum(tensor.nbytes for tensor in group),
        indices=_ranges(sorted({row[0] for row in numbers if row})),
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def size_text(nbytes: float) -> str:
    """Bytes for people: "810.0 GB" (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
