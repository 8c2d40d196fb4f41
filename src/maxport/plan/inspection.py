"""What a checkpoint's config.json says, who reads each key, and whether MAX has the model already.

Everything comes from config.json, safetensors headers and source text; nothing is imported or run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maxport.checkpoint import Checkpoint, known_model_types
from maxport.checkpoint.configs import model_type_of, needs_remote_code
from maxport.checkpoint.known import attribute_map, causal_lm_classes
from maxport.checkpoint.summary import by_dtype
from maxport.errors import MaxportError
from maxport.plan.config_reads import Read, Reads, reads_of_pipeline, reads_of_port, reads_of_slug
from maxport.plan.native import NativeArch, arch_by_slug, serving

_SAME = (
    ("torch_dtype", "dtype"),
    ("rope_theta", "rope_parameters.rope_theta"),
    ("rope_scaling", "rope_parameters"),
)
"""Keys transformers 5 reads as one another (PreTrainedConfig, RotaryEmbeddingConfigMixin)."""


@dataclass(frozen=True)
class KeyRow:
    """One key of config.json.

    `pipeline` are reads by MAX's code for every model, `reader` reads by the chosen architecture,
    `port` by the port directory (None without one); `hf` is filled by `--measure`: the places in
    the reference code that read the key, empty if none does, None if it was not measured.
    """

    key: str
    value: Any
    pipeline: tuple[Read, ...]
    reader: tuple[Read, ...] | None
    port: tuple[Read, ...] | None
    hf: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Inspection:
    """Result of `inspect`: see the fields of `to_json`."""

    checkpoint: Checkpoint
    native: tuple[NativeArch, ...]
    reader: NativeArch | None
    rows: tuple[KeyRow, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as plain data (schema: cli/schemas/inspect.json)."""
        opened = self.checkpoint
        config = opened.config
        return {
            "model": opened.model,
            "revision": opened.revision,
            "folder": str(opened.folder),
            "architecture": opened.architecture,
            "model_type": config.get("model_type"),
            "known_to_transformers": known_to_transformers(config),
            "needs_remote_code": needs_remote_code(config),
            "tokenizer_files": list(opened.tokenizer_files),
            "generation_config": opened.generation_config,
            "weights": {
                "tensors": len(opened.tensors),
                "bytes": opened.nbytes,
                "files": len({t.file for t in opened.tensors.values()}),
                "dtypes": by_dtype(opened.tensors.values()),
                "other": list(opened.other_weights),
            },
            "native": [
                {**asdict(arch), "serve": serve_command(opened.model, arch)} for arch in self.native
            ],
            "read_by": self.reader.slug if self.reader else None,
            "keys": [asdict(row) for row in self.rows],
        }


def inspect_checkpoint(
    opened: Checkpoint, *, start_from: str | None = None, port_dir: Path | None = None
) -> Inspection:
    """Look up each config key of a checkpoint in MAX's sources and in a port's.

    Args:
        opened: The checkpoint.
        start_from: Slug of the architecture whose reads are reported; default is the native
            ModuleV3 architecture of this model, else its V2 one, else none.
        port_dir: A port directory whose reads are reported too.

    Raises:
        MaxportError: MAX is not installed, no such slug, or no such port directory.
    """
    native = serving(opened.architecture) if opened.architecture else ()
    decoders = [arch for arch in native if arch.task == "text_generation"]
    own = next(iter([*reversed(decoders), *native]), None)
    reader = arch_by_slug(start_from) if start_from else own
    if port_dir is not None and not (port_dir / "__init__.py").is_file():
        raise MaxportError(
            "no port directory there",
            where=str(port_dir),
            fix="name the folder that holds the port's __init__.py and arch.py",
        )
    names = {v: k for k, v in attribute_map(model_type_of(opened.config)).items()}
    by_reader = reads_of_slug(reader.slug) if reader else None
    by_port = reads_of_port(port_dir) if port_dir else None
    rows = tuple(
        KeyRow(
            key=key,
            value=value,
            pipeline=_reads(reads_of_pipeline(), key, names) or (),
            reader=_reads(by_reader, key, names),
            port=_reads(by_port, key, names),
        )
        for key, value in flatten(opened.config)
    )
    return Inspection(opened, native, reader, rows)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf: nested objects by dotted path, lists as values."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def known_to_transformers(config: Mapping[str, Any]) -> bool:
    """Whether the installed transformers has this model type."""
    return model_type_of(config) in known_model_types()


def is_causal_lm(config: Mapping[str, Any]) -> bool:
    """Whether transformers has a causal-LM class for this model type, or the config names one."""
    names = config.get("architectures") or [""]
    named = isinstance(names, list) and str(names[0]) in set(causal_lm_classes().values())
    return named or model_type_of(config) in causal_lm_classes()


def serve_command(model: str, arch: NativeArch) -> str:
    """The command that serves a model with MAX's own architecture."""
    parts = ["max serve --model", model]
    if arch.name.endswith("_ModuleV3"):
        parts.append("--prefer-module-v3")
    if arch.required_arguments.get("trust_remote_code"):
        parts.append("--trust-remote-code")
    return " ".join(parts)


def _reads(table: Reads | None, key: str, names: Mapping[str, str]) -> tuple[Read, ...] | None:
    """Reads of a key under any name it goes by; a whole object read counts for its items."""
    if table is None:
        return None
    found: dict[tuple[str, str], Read] = {}
    for name in aliases(key, names):
        for read in table.get(name, ()):
            found.setdefault((read.into, read.place), read)
    return tuple(found.values())


def aliases(key: str, names: Mapping[str, str]) -> list[str]:
    """All names a key of config.json is read by: itself, the common name, transformers 5's.

    `names` maps a model's own key to the common one (n_embd -> hidden_size).
    """
    listed = [key]
    if key in names:
        listed.append(names[key])
    for left, right in _SAME:
        for old, new in ((left, right), (right, left)):
            if key == old or key.startswith(old + "."):
                listed.append(new + key[len(old) :])
    for name in list(listed):
        if name.endswith(".type"):
            listed.append(name.removesuffix("type") + "rope_type")
        elif name.endswith(".rope_type"):
            listed.append(name.removesuffix("rope_type") + "type")
    return listed
