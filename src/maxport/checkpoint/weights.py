"""Which files of a checkpoint hold its weights, and their headers put together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from maxport.checkpoint.configs import parse_object
from maxport.checkpoint.headers import TensorHeader
from maxport.checkpoint.source import Source
from maxport.errors import MaxportError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OTHER = re.compile(
    r"(pytorch_model|model|flax_model|tf_model|consolidated|rust_model|adapter_model)[^/]*"
    r"\.(bin|pt|pth|h5|msgpack|ckpt|ot|onnx|safetensors)|[^/]*\.gguf"
)


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors shards to read and any weight files in formats that are not read."""

    shards: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    other: tuple[str, ...]


def find_weights(source: Source) -> WeightFiles:
    """Choose the weight files as transformers does: the single file first, else the index.

    Raises:
        MaxportError: The index is malformed or names a file that is not there; shards without
            an index.
    """
    files = source.files()
    other = tuple(name for name in files if _OTHER.fullmatch(name))
    if SINGLE in files:
        return WeightFiles((SINGLE,), None, tuple(n for n in other if n != SINGLE))
    if INDEX in files:
        weight_map = _weight_map(source)
        shards = tuple(sorted(set(weight_map.values())))
        _check_present(shards, files, source.where)
        return WeightFiles(shards, weight_map, tuple(n for n in other if n not in shards))
    if pieces := [name for name in files if re.fullmatch(r"model-.*\.safetensors", name)]:
        raise MaxportError(
            f"{len(pieces)} safetensors shards but no {INDEX}",
            where=source.where,
            fix=f"download {INDEX} too",
        )
    return WeightFiles((), None, other)


def read_tensors(source: Source, weights: WeightFiles) -> dict[str, TensorHeader]:
    """Headers of all tensors by name, in file order, checked against the index.

    Raises:
        MaxportError: A header is wrong, a tensor is in two shards, or the index puts a tensor
            into a shard that lacks it.
    """
    tensors: dict[str, TensorHeader] = {}
    for headers in source.headers(weights.shards):
        for tensor in headers:
            if twin := tensors.get(tensor.name):
                raise MaxportError(
                    f"the tensor {tensor.name} is in two shards",
                    where=f"{source.where}: {twin.file} and {tensor.file}",
                )
            tensors[tensor.name] = tensor
    for name, shard in (weights.weight_map or {}).items():
        held = tensors.get(name)
        if held is None or held.file != shard:
            truth = f"it is in {held.file}" if held else "no shard has it"
            raise MaxportError(
                f"the index places {name} in {shard}, but {truth}",
                where=f"{source.where}/{INDEX}",
                fix="download the index and the shards from the same revision",
            )
    return tensors


def check_convertible(weights: WeightFiles, where: str) -> None:
    """Refuse checkpoints whose weights exist only in formats that are not read.

    Raises:
        MaxportError: There are weight files, but none of them is safetensors.
    """
    if weights.shards or not weights.other:
        return
    kinds = sorted({PurePosixPath(name).suffix for name in weights.other})
    fix = (
        "load it with transformers and call "
        "`model.save_pretrained(folder)`, which writes safetensors"
    )
    if ".gguf" in kinds:
        fix = "download the .gguf file and pass its path as MODEL"
    if any(name.startswith("adapter_model") for name in weights.other):
        fix = "merge the adapter into its base model first (peft: `merge_and_unload`)"
    raise MaxportError(
        f"the checkpoint has weights only as {', '.join(kinds)}, not as {SINGLE}",
        where=f"{where}: {_some(weights.other)}",
        fix=fix,
    )


def _weight_map(source: Source) -> dict[str, str]:
    place = f"{source.where}/{INDEX}"
    weight_map = parse_object(source.read(INDEX), INDEX, source.where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MaxportError("the safetensors index has no weight_map", where=place)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or PurePosixPath(shard).name != shard or "\\" in shard:
            raise MaxportError(
                f"the safetensors index places {tensor} in {shard!r}, which is no file name",
                where=place,
            )
    return weight_map


def _check_present(shards: Iterable[str], files: Mapping[str, int | None], where: str) -> None:
    missing = [name for name in shards if name not in files]
    if missing:
        raise MaxportError(
            f"the safetensors index names {len(missing)} shard(s) that are not there",
            where=f"{where}: {_some(missing)}",
            fix="download the missing shards",
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
