"""Which config keys Hugging Face's code really reads, recorded while it builds and runs a twin.

Reading the source would miss `getattr` with computed names and keys read by shared helpers; lists
go stale. So a tiny twin of the model is built and run once with every attribute access on its
configs recorded, together with the line of code that made it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from maxport.checkpoint import Checkpoint
from maxport.errors import MaxportError

if TYPE_CHECKING:
    from maxport.plan.inspection import Inspection

_TOKENS = 8
_NOT_READERS = ("configuration_", "auto_factory", "auto/configuration")
"""Files that copy or validate configs as a whole; what they touch says nothing about a model."""


@dataclass(frozen=True)
class ConfigAccess:
    """Keys read, as paths in the config, each with the places that read it.

    `forward` says whether a forward pass ran, or why not.
    """

    reads: dict[str, tuple[str, ...]]
    forward: str


def measure_reads(opened: Checkpoint, *, trust_remote_code: bool = False) -> ConfigAccess:
    """Build a twin of the checkpoint's model, run 8 tokens through it, record config accesses.

    Raises:
        MaxportError: transformers cannot load the config or build the model.
    """
    from transformers import AutoConfig

    from maxport.twin import twin_config

    try:
        config = AutoConfig.from_pretrained(opened.folder, trust_remote_code=trust_remote_code)
        return record_reads(twin_config(config))
    except MaxportError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise MaxportError(
            f"transformers cannot build this model: {reason}",
            where=str(opened.folder),
            fix="run without --measure",
        ) from error


def record_reads(small: Any) -> ConfigAccess:
    """Build the model of a twin's config, run 8 tokens through it, record config accesses.

    Raises:
        MaxportError: transformers cannot build the model.
    """
    import torch

    from maxport.twin import twin_model

    recorder = _Recorder()
    with recorder.watching(small):
        model = twin_model(small)
        forward = f"a forward pass of {_TOKENS} tokens"
        try:
            with torch.no_grad():
                model(input_ids=torch.arange(_TOKENS)[None])
        except Exception as error:
            reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
            forward = f"no forward pass: {reason}"
    return ConfigAccess({k: tuple(v) for k, v in sorted(recorder.reads.items())}, forward)


def with_measured(inspection: Inspection, access: ConfigAccess) -> Inspection:
    """The inspection with each row's `hf` places filled in, own model code first."""
    from maxport.checkpoint.configs import model_type_of
    from maxport.checkpoint.known import attribute_map
    from maxport.plan.inspection import aliases

    model_type = model_type_of(inspection.checkpoint.config)
    names = {own: common for common, own in attribute_map(model_type).items()}

    def places(key: str) -> tuple[str, ...]:
        found = [p for name in aliases(key, names) for p in access.reads.get(name, ())]
        return tuple(sorted(dict.fromkeys(found), key=lambda place: not place.startswith("models")))

    rows = tuple(replace(row, hf=places(row.key)) for row in inspection.rows)
    return replace(inspection, rows=rows)


@dataclass
class _Recorder:
    reads: dict[str, dict[str, None]] = field(default_factory=dict)

    def note(self, key: str) -> None:
        if place := _caller():
            self.reads.setdefault(key, {})[place] = None

    @contextmanager
    def watching(self, config: Any) -> Iterator[None]:
        """Record accesses to this config and the configs nested in it, and to copies of them."""
        from transformers import PretrainedConfig

        prefixes = dict(_config_types(config))
        original = PretrainedConfig.__getattribute__

        def get(this: Any, name: str) -> Any:
            value = original(this, name)
            prefix = prefixes.get(type(this))
            if prefix is None or name.startswith("_") or callable(value):
                return value
            key = prefix + type(this).attribute_map.get(name, name)
            self.note(key)
            return _Watched(value, self, key) if type(value) is dict else value

        with patch.object(PretrainedConfig, "__getattribute__", get):
            yield


class _Watched(dict[str, Any]):
    """A nested value (rope_parameters) that records which of its items are read."""

    def __init__(self, value: dict[str, Any], recorder: _Recorder, path: str) -> None:
        super().__init__(value)
        self._recorder, self._path = recorder, path

    def __getitem__(self, key: str) -> Any:
        self._recorder.note(f"{self._path}.{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._recorder.note(f"{self._path}.{key}")
        return super().get(key, default)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _config_types(config: Any, prefix: str = "") -> Iterator[tuple[type, str]]:
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            yield from _config_types(value, f"{prefix}{name}.")
    yield type(config), prefix


def _caller() -> str | None:
    """`file:line` of the model code that reads a config; None if it is no model code."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "unittest/mock" not in file:
            break
        frame = frame.f_back  # type: ignore[assignment]
    path = Path(file)
    if any(part in file for part in _NOT_READERS):
        return None
    parts = path.parts
    for marker in ("transformers", "transformers_modules"):
        if marker in parts:
            at = len(parts) - parts[::-1].index(marker)
            return f"{'/'.join(parts[at:])}:{frame.f_lineno}"
    return None
