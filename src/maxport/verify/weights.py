"""Which weights a verdict is made on: the checkpoint's own, or a twin's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxport.engine.devices import memory_free
from maxport.errors import MaxportError
from maxport.quiet import quiet

#: Reference and port in float32, and room for activations, per stored float32 parameter.
_BYTES_PER_PARAMETER = 10


@dataclass(frozen=True)
class Judged:
    """A folder to judge on.

    Attributes:
        folder: With config.json and safetensors files.
        kind: `checkpoint` or `twin`.
        note: Why a twin stands in; empty for the checkpoint's own weights.
    """

    folder: Path
    kind: str
    note: str = ""


def judged_weights(
    checkpoint: Any, temp: Path, *, twin: bool, encoding: str, kernels: bool, remote: bool = False
) -> Judged:
    """The checkpoint's weights if it has any and this machine can hold them, else a twin.

    Args:
        checkpoint: An opened `maxport.checkpoint.Checkpoint`.
        temp: Where a twin's folder is made.
        twin: Use a twin in any case.
        encoding: Working precision; a twin's weights are stored in it.
        kernels: The graph is compiled, so sizes must suit MAX's kernels.
        remote: Whether the checkpoint's own code may run.
    """
    if not checkpoint.tensors:
        return _twin(checkpoint, temp, "the checkpoint has no weights", encoding, kernels, remote)
    if twin:
        return _twin(checkpoint, temp, "asked for", encoding, kernels, remote)
    need, have = memory_needed(checkpoint), memory_free()
    if need > have:
        why = f"the weights need {need / 2**30:.1f} GiB in float32, {have / 2**30:.1f} are free"
        return _twin(checkpoint, temp, why, encoding, kernels, remote)
    return Judged(checkpoint.weights_folder(), "checkpoint")


def memory_needed(checkpoint: Any) -> int:
    """Bytes that reference and port need together, in float32."""
    parameters = 0
    for tensor in checkpoint.tensors.values():
        count = 1
        for size in tensor.shape:
            count *= size
        parameters += count
    return parameters * _BYTES_PER_PARAMETER


def _twin(
    checkpoint: Any, temp: Path, why: str, encoding: str, kernels: bool, remote: bool
) -> Judged:
    import torch
    import transformers

    from maxport.twin import save_twin, twin_config

    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=remote
        )
    except Exception as error:
        raise MaxportError(
            f"transformers does not read the config: {' '.join(str(error).split())[:300]}",
            where=str(checkpoint.folder / "config.json"),
            fix="" if remote else "if the model needs its own code, pass --trust-remote-code",
        ) from error
    # Compiled attention on a CPU takes no sliding window below 128 (MAX 26.7).
    shape = {"window": 128} if kernels else {}
    with quiet():
        small = twin_config(config, 2, **shape)
        small.architectures = checkpoint.config.get("architectures") or small.architectures
        folder = save_twin(small, temp / "twin", dtype=getattr(torch, encoding))
    return Judged(folder, "twin", f"judged on a small random twin: {why}")
