"""Open a checkpoint by the name a user gives: folder, GGUF file or Hub id."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxport.checkpoint.configs import check_portable, parse_object
from maxport.checkpoint.gguf import convert_gguf, find_gguf
from maxport.checkpoint.headers import TensorHeader
from maxport.checkpoint.source import LocalSource, Source
from maxport.checkpoint.weights import (
    INDEX,
    WeightFiles,
    check_convertible,
    find_weights,
    read_tensors,
)
from maxport.errors import MaxportError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_TOKENIZER = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|spiece\.model|sentencepiece.*\.model|chat_template.*|tekken\.json|[^/]*\.tiktoken"
    r"|tiktoken\.model|tokenization_\w+\.py"
)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its configs and the headers of its tensors; no tensor is loaded.

    Attributes:
        model: What the user named: a path or a Hub id.
        revision: The Hub commit that answered; None for local checkpoints.
        folder: Folder with config.json. For a Hub checkpoint the snapshot in the Hub's own
            cache, which lacks the weights until `weights_folder` is called.
        config: config.json as written, nested configs included.
        generation_config: generation_config.json, or None if there is none.
        tokenizer_files: Names of the tokenizer files present.
        tensors: Tensor headers by name; empty for a folder that has a config and no weights.
        other_weights: Weight files in formats that are not read (.bin, .pth, ...).
        converted_from: The GGUF file this checkpoint was converted from, or None.
    """

    model: str
    revision: str | None
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tokenizer_files: tuple[str, ...]
    tensors: Mapping[str, TensorHeader]
    other_weights: tuple[str, ...] = ()
    converted_from: Path | None = None
    _source: Source = field(repr=False, kw_only=True)

    @property
    def architecture(self) -> str | None:
        """`architectures[0]`, or None where the config names none."""
        names = self.config.get("architectures")
        ok = isinstance(names, list) and names and isinstance(names[0], str)
        return str(names[0]) if ok and names else None

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A small JSON file of the checkpoint (tokenizer_config.json); None if it is not there.

        Raises:
            MaxportError: It is malformed or cannot be fetched.
        """
        if name not in self._source.files():
            return None
        return parse_object(self._source.read(name), name, self._source.where)

    def weights_folder(self) -> Path:
        """Local folder with config, tokenizer and every shard; downloads them from the Hub once.

        Raises:
            MaxportError: The checkpoint has no weights, or the download fails.
        """
        if not self.tensors:
            raise MaxportError(
                "the checkpoint has a config but no weights",
                where=str(self.folder),
                fix="name a folder or Hub id with safetensors files",
            )
        files = self._source.files()
        shards = {tensor.file for tensor in self.tensors.values()}
        extra = {CONFIG, GENERATION_CONFIG, INDEX, *self.tokenizer_files} & files.keys()
        return self._source.fetch(sorted(extra) + sorted(shards))


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    inspect_only: bool = False,
) -> Checkpoint:
    """Open a checkpoint folder, a GGUF file or a Hub repository; reads headers, loads no tensor.

    Args:
        model: Folder, GGUF file, folder with one GGUF file, or Hub id.
        revision: Branch, tag or commit on the Hub; must be None for local paths.
        trust_remote_code: Accept architectures that exist only as code in the checkpoint.
        inspect_only: The caller only reports: accept a missing `architectures`, remote code and
            weights in unread formats (`Checkpoint.other_weights` lists them).

    Raises:
        MaxportError: Nothing there, no config.json, a malformed config, index or header, a
            missing or truncated shard, an unread weight format, or a Hub failure.
    """
    path = _local_path(model)
    if path is None:
        from maxport.checkpoint.hub import HubSource

        hub = HubSource(model, revision)
        return _open(hub, model, revision=hub.commit, trust=trust_remote_code, lenient=inspect_only)
    if revision is not None:
        raise MaxportError(
            "--revision applies to Hub ids, but MODEL is a local path",
            where=model,
            fix="leave out --revision or name a Hub id",
        )
    gguf = find_gguf(path)
    folder = convert_gguf(gguf, progress=_tell) if gguf else path
    source = LocalSource(folder)
    return _open(
        source, model, revision=None, trust=trust_remote_code, lenient=inspect_only, gguf=gguf
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _local_path(model: str) -> Path | None:
    """The path `model` names, or None if it can only be a Hub id."""
    if not model.strip():
        raise MaxportError("MODEL is empty", fix="name a folder, a GGUF file or a Hub id")
    if "\0" in model:
        raise MaxportError("MODEL contains a zero byte")
    path = Path(model).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:
        raise MaxportError(f"MODEL is no usable path: {error.strerror}") from error
    looks_local = (
        path.is_absolute()
        or model.startswith((".", "~"))
        or "\\" in model
        or model.endswith((".gguf", "/", ".safetensors", ".json"))
        or model.count("/") > 1
    )
    if looks_local:
        raise MaxportError(
            "no such checkpoint folder or file", where=model, fix="check the path of MODEL"
        )
    return None


def _open(
    source: Source,
    model: str,
    *,
    revision: str | None,
    trust: bool,
    lenient: bool,
    gguf: Path | None = None,
) -> Checkpoint:
    files = source.files()
    if CONFIG not in files:
        raise MaxportError(
            "the checkpoint has no config.json",
            where=source.where,
            fix="MODEL must be a folder or Hub id that holds config.json, or a .gguf file",
        )
    config = parse_object(source.read(CONFIG), CONFIG, source.where)
    generation = None
    if GENERATION_CONFIG in files:
        generation = parse_object(source.read(GENERATION_CONFIG), GENERATION_CONFIG, source.where)
    if not lenient:
        check_portable(config, source.where, trust_remote_code=trust)
    weights = find_weights(source)
    if not lenient:
        check_convertible(weights, source.where)
    if trust:
        source.fetch([name for name in files if name.endswith(".py")])
    return Checkpoint(
        model=model,
        revision=revision,
        folder=source.folder,
        config=config,
        generation_config=generation,
        tokenizer_files=tuple(name for name in files if _TOKENIZER.fullmatch(name)),
        tensors=_tensors(source, weights),
        other_weights=weights.other,
        converted_from=gguf,
        _source=source,
    )


def _tensors(source: Source, weights: WeightFiles) -> Mapping[str, TensorHeader]:
    return read_tensors(source, weights) if weights.shards else {}
