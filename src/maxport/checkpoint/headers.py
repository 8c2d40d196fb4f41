"""safetensors headers: names, dtypes, shapes and places of tensors, checked against the file.

The format: 8 bytes little-endian length N, N bytes of JSON, then one data buffer that the tensors
tile without gaps. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from maxport.errors import MaxportError

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element of every dtype code the format knows."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit on the header's length."""

PREFIX_BYTES = 8
DOWNLOAD_AGAIN = "download or save this file again"


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a checkpoint, as its file's header states it.

    `dtype` is the safetensors code ("F32", "BF16"); `file` is the shard's name inside the
    checkpoint; `start` and `end` are byte offsets from the beginning of that file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.end - self.start

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def header_length(prefix: bytes, file: str, file_size: int | None) -> int:
    """Length in bytes of the JSON header, from the file's first 8 bytes.

    Raises:
        MaxportError: The file is too short, or the length is impossible.
    """
    if len(prefix) < PREFIX_BYTES:
        raise MaxportError(
            "a safetensors file is truncated: it has no header",
            where=f"{file}: {len(prefix)} bytes",
            fix=DOWNLOAD_AGAIN,
        )
    (length,) = struct.unpack("<Q", prefix[:PREFIX_BYTES])
    if length > MAX_HEADER_BYTES:
        raise MaxportError(
            "a safetensors file starts with an impossible header length",
            where=f"{file}: {length} bytes",
            fix="check that this is a safetensors file and not a Git LFS pointer or an HTML page",
        )
    if file_size is not None and PREFIX_BYTES + length > file_size:
        raise MaxportError(
            "a safetensors file is truncated inside its header",
            where=f"{file}: header of {length} bytes, file of {file_size}",
            fix=DOWNLOAD_AGAIN,
        )
    return int(length)


def read_header(path: Path, file: str) -> tuple[TensorHeader, ...]:
    """Headers of every tensor in a local safetensors file; `file` is its name in messages.

    Raises:
        MaxportError: The file is unreadable, truncated, or its header contradicts itself or the
            file's size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = header_length(stream.read(PREFIX_BYTES), file, size)
            body = stream.read(length)
    except OSError as error:
        raise MaxportError(
            "a safetensors file cannot be read", where=f"{file}: {error.strerror}"
        ) from error
    return parse_header(body, file, size)


def parse_header(body: bytes, file: str, file_size: int | None) -> tuple[TensorHeader, ...]:
    """Parse and check a header's JSON; `file_size` None skips the check against the file's end.

    Raises:
        MaxportError: Not JSON, an entry is malformed, a tensor's bytes do not fit its dtype and
            shape, tensors overlap or leave a gap, or the data does not end where the file does.
    """
    entries = _entries(body, file)
    data_start = PREFIX_BYTES + len(body)
    found = [_tensor(name, entry, file, data_start) for name, entry in entries.items()]
    _check_tiling(found, file, data_start, file_size)
    return tuple(found)


def _entries(body: bytes, file: str) -> dict[str, Any]:
    try:
        parsed = json.loads(body.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _lie(file, f"the header is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _lie(file, "the header is not a JSON object")
    parsed.pop("__metadata__", None)
    return parsed


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is listed twice")
    return result


def _tensor(name: str, entry: Any, file: str, data_start: int) -> TensorHeader:
    if not isinstance(entry, dict):
        raise _lie(file, f"the entry of {name} is not an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _lie(file, f"{name} has the unknown dtype {dtype!r}")
    if not _naturals(shape):
        raise _lie(file, f"{name} has the impossible shape {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _lie(file, f"{name} has the impossible data_offsets {offsets!r}")
    start, end = offsets
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - start):
        raise _lie(
            file,
            f"{name} is {dtype} {list(shape)}, which takes {bits / 8:g} bytes, "
            f"but its data_offsets span {end - start}",
        )
    return TensorHeader(name, dtype, tuple(shape), file, data_start + start, data_start + end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(
    found: list[TensorHeader], file: str, data_start: int, file_size: int | None
) -> None:
    at, previous = data_start, ""
    for tensor in sorted(found, key=lambda t: (t.start, t.end)):
        if tensor.start < at:
            raise _lie(file, f"{tensor.name} overlaps {previous}")
        if tensor.start > at:
            raise _lie(file, f"{tensor.start - at} bytes before {tensor.name} belong to no tensor")
        at, previous = tensor.end, tensor.name
    if file_size is None or at == file_size:
        return
    if at > file_size:
        raise MaxportError(
            "a safetensors file is truncated: its header promises more bytes than there are",
            where=f"{file}: {previous} ends at byte {at}, the file has {file_size}",
            fix=DOWNLOAD_AGAIN,
        )
    raise _lie(file, f"{file_size - at} bytes after the last tensor belong to no tensor")


def _lie(file: str, detail: str) -> MaxportError:
    return MaxportError(
        "a safetensors header is wrong", where=f"{file}: {detail}", fix=DOWNLOAD_AGAIN
    )
