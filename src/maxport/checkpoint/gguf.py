"""GGUF -> a safetensors folder in the user's cache, converted once.

Everything about the format is left to the readers of `gguf` and transformers
(transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint, AutoTokenizer's `gguf_file`); this
module finds the file, keeps the cache and checks that no tensor was lost on the way.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from maxport.checkpoint.cache import cache_root, folder_moved_in_whole
from maxport.errors import MaxportError

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
FORMAT = "1"
"""Raised when the conversion itself changes, so that cached folders are made anew."""

_SAMPLE_BYTES = 1 << 22
_SPLIT = re.compile(r".*-\d{5}-of-\d{5}\.gguf")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` stands for, or None if it is a folder to read as it is.

    A folder counts if it has one .gguf file and no safetensors.

    Raises:
        MaxportError: A file that is no GGUF; several GGUF files to choose from; a split GGUF.
    """
    if path.is_file():
        return _checked(path)
    try:
        names = sorted(p.name for p in path.iterdir())
    except OSError as error:
        raise MaxportError(
            "the checkpoint folder cannot be read", where=f"{path}: {error.strerror}"
        ) from error
    found = [name for name in names if name.endswith(".gguf")]
    if not found or any(n.endswith((".safetensors", ".safetensors.index.json")) for n in names):
        return None
    if len(found) > 1 and not _SPLIT.fullmatch(found[0]):
        raise MaxportError(
            f"the folder holds {len(found)} GGUF files",
            where=f"{path}: {', '.join(found[:4])}",
            fix="pass one of the files as MODEL",
        )
    return _checked(path / found[0])


def _checked(path: Path) -> Path:
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise MaxportError("MODEL cannot be read", where=f"{path}: {error.strerror}") from error
    if magic != MAGIC:
        raise MaxportError(
            "MODEL is a file, but not a GGUF file",
            where=str(path),
            fix="name the folder that holds config.json and the safetensors, or a .gguf file",
        )
    if _SPLIT.fullmatch(path.name):
        raise MaxportError(
            "this GGUF is split over several files",
            where=str(path),
            fix="merge it first: llama-gguf-split --merge FIRST_PART.gguf MERGED.gguf",
        )
    return path


def convert_gguf(
    path: Path,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Folder with config.json, safetensors, generation config and tokenizer made from a GGUF.

    The weights are dequantised; they are stored as float16 or bfloat16 where that loses nothing
    (a GGUF of that type), else as float32. The first call converts (needs torch and about twice
    the float32 size in memory); later calls return the same folder at once. The tokenizer is what
    transformers rebuilds: it ignores the file's `tokenizer.ggml.pre`, so where a model splits text
    in an unusual way, ids can differ from the original tokenizer's.

    Args:
        path: The GGUF file.
        cache_dir: Folder to keep conversions in; default `cache_root()/gguf`.
        progress: Called with one line before and after a conversion.

    Raises:
        MaxportError: The file is damaged, of an architecture transformers does not read, its
            tokenizer cannot be rebuilt, or it lacks tensors that the model needs.
    """
    target = (cache_dir or cache_root() / "gguf") / f"{_slug(path)}-{_fingerprint(path)}"
    if target.is_dir():
        return target
    say = progress or (lambda line: None)
    began = time.monotonic()
    say(f"converting {path.name} to safetensors, once")
    with folder_moved_in_whole(target) as work, _readers_shared(path) as reader:
        _check_complete(path, reader)
        _convert(path, work, reader)
        for file in work.iterdir():
            file.chmod(0o644)
    say(f"converted in {time.monotonic() - began:.0f} s: {target}")
    return target


def _slug(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", path.stem).strip("-.") or "model"


def _fingerprint(path: Path) -> str:
    """Names one conversion: size, time, first and last bytes of the file, and the readers used."""
    stat = path.stat()
    digest = hashlib.sha256()
    for part in (FORMAT, version("transformers"), version("gguf"), stat.st_size, stat.st_mtime_ns):
        digest.update(f"{part}\n".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, stat.st_size - _SAMPLE_BYTES))
        digest.update(stream.read())
    return digest.hexdigest()[:16]


@contextmanager
def _readers_shared(path: Path) -> Iterator[Any]:
    """Yield a GGUFReader of `path` that the readers below use too, quietly.

    Config, weights and tokenizer are three calls into transformers, each of which parses the file
    and its vocabulary again in Python, and the name table once per module: minutes on a slow
    machine. Inside this context they share one reader and one table, and show no bars or warnings.
    """
    import gguf
    import transformers.modeling_gguf_pytorch_utils as reading
    from transformers.utils import logging

    with _reading(path, "metadata"):
        reader = gguf.GGUFReader(str(path))
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with (
            redirect_stdout(sys.stderr),
            patch.object(gguf, "GGUFReader", lambda name: reader),
            patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
            patch.object(reading, "tqdm", lambda items, **_: items),
        ):
            yield reader
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a third-party reader raises on a bad file into one message."""
    try:
        yield
    except MaxportError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise MaxportError(
            f"the GGUF's {what} cannot be read: {reason}",
            where=str(path),
            fix="check that the file is complete and that transformers reads its architecture",
        ) from error


def _convert(path: Path, folder: Path, reader: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(path.resolve().parent), "gguf_file": path.name}
    with _reading(path, "metadata"):
        config = AutoConfig.from_pretrained(**place)
    _shorten_floats(config)
    config.__dict__.pop("_model_name_or_path", None)
    model = _load(path, config, AutoModelForCausalLM)
    with _reading(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(**place)
        _set_special_tokens(tokenizer, reader)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _set_special_tokens(tokenizer: Any, reader: Any) -> None:
    """Name the special tokens as the file does.

    transformers 5.12 takes the end-of-text token from `bos_token_id` (GGUFLlamaConverter.tokenizer
    in integrations/ggml.py) and does not read whether a BOS or EOS token is added to a text.
    """
    for attribute, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if field := reader.fields.get(f"tokenizer.ggml.{key}_token_id"):
            token = tokenizer.convert_ids_to_tokens(int(field.contents()))
            setattr(tokenizer, f"{attribute}_token", token)
            tokenizer.init_kwargs[f"{attribute}_token_id"] = int(field.contents())
    for key in ("add_bos_token", "add_eos_token"):
        if field := reader.fields.get(f"tokenizer.ggml.{key}"):
            setattr(tokenizer, key, bool(field.contents()))
            tokenizer.init_kwargs[key] = bool(field.contents())
    for key in ("is_local", "local_files_only", "model_type"):
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    tokenizer.clean_up_tokenization_spaces = False


def _shorten_floats(config: Any) -> None:
    """Undo the float32 rounding of GGUF metadata: 9.99999974e-06 was written as 1e-05."""
    import numpy as np

    for key, value in vars(config).items():
        if isinstance(value, float) and float(np.float32(value)) == value:
            setattr(config, key, float(str(np.float32(value))))


def _check_complete(path: Path, reader: Any) -> None:
    """Raise if a tensor reaches beyond the file's end."""
    size = path.stat().st_size
    for tensor in reader.tensors:
        if int(tensor.data_offset) + int(tensor.n_bytes) > size:
            raise MaxportError(
                "the GGUF file is truncated",
                where=f"{path}: {tensor.name} ends beyond the file's {size} bytes",
                fix="download it again",
            )


def _load(path: Path, config: Any, auto_class: Any) -> Any:
    """The causal LM with the file's tensors, in the dtype they are stored with."""
    import torch
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _reading(path, "weights"):
        with torch.device("meta"):
            model = auto_class.from_config(config)
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
        tensors: dict[str, torch.Tensor] = read["tensors"]
        dtype = _lossless_dtype(tensors.values())
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        outcome = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    missing = [n for n, p in model.named_parameters() if p.is_meta]
    if missing or outcome.unexpected_keys:
        lost = missing or outcome.unexpected_keys
        raise MaxportError(
            f"{len(lost)} tensors of the GGUF and of {type(model).__name__} do not match",
            where=f"{path}: {', '.join(lost[:3])}",
            fix="convert from the original safetensors checkpoint instead",
        )
    model.config.dtype = dtype
    return model


def _lossless_dtype(tensors: Any) -> torch.dtype:
    """bfloat16 or float16 if every tensor survives the cast, else float32."""
    import torch

    candidates = [torch.bfloat16, torch.float16]
    for tensor in tensors:
        candidates = [d for d in candidates if torch.equal(tensor.to(d).to(tensor.dtype), tensor)]
        if not candidates:
            return torch.float32
    return candidates[0] if candidates else torch.float32
