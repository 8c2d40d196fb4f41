"""Checks of a port directory that need no compile: one file per gate.

`run_gates` opens the checkpoint, has the port imported and its graph built in a fresh process, and
asks every gate for one result.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxport.checkpoint import Checkpoint, open_checkpoint
from maxport.errors import MaxportError
from maxport.gates import (
    adapter,
    arch,
    build,
    docstrings,
    import_smoke,
    lint,
    preflight,
    registry_dry_run,
    tied,
)
from maxport.gates.base import Finding, GateResult, Port, Subject
from maxport.gates.probe import run_probe
from maxport.verify.weights import judged_weights

__all__ = ["GATES", "Finding", "GateResult", "Subject", "run_gates"]

#: The gates in the order they are reported: a failure often explains those below it.
GATES: tuple[tuple[str, Callable[[Subject], GateResult]], ...] = (
    (preflight.NAME, preflight.check),
    (import_smoke.NAME, import_smoke.check),
    (registry_dry_run.NAME, registry_dry_run.check),
    (arch.NAME, arch.check),
    (build.NAME, build.check),
    (adapter.NAME, adapter.check),
    (tied.NAME, tied.check),
    (lint.NAME, lint.check),
    (docstrings.NAME, docstrings.check),
)


def run_gates(
    model: str,
    port_dir: Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str = "cpu",
    encoding: str | None = None,
    twin: bool = False,
    limit_s: float = 120.0,
) -> list[GateResult]:
    """All gates on one port.

    Args:
        model: Checkpoint folder or Hub id.
        port_dir: The folder given to `--custom-architectures`.
        revision: Branch, tag or commit on the Hub.
        trust_remote_code: Whether code in the checkpoint may be used.
        device: `cpu` or `gpu`, simulated where there is none.
        encoding: Dtype to build in; if None float32 on CPU, bfloat16 on GPU.
        twin: Build on a small random twin instead of the checkpoint's weights; always done where
            there are none, where they are on the Hub, and where memory does not hold them.
        limit_s: Seconds after which building is stopped.

    Raises:
        MaxportError: No such port folder, or nothing that is a checkpoint.
    """
    if not port_dir.is_dir():
        raise MaxportError("no such port directory", where=str(port_dir), fix="check --port-dir")
    checkpoint, config, trouble = _open(model, revision, trust_remote_code)
    folder = port_dir.resolve()
    subject = Subject(
        port=Port(folder),
        class_name=_class_name(config),
        config=config,
        checkpoint=checkpoint,
        trouble=trouble,
        steps={},
        device=device,
    )
    encoding = encoding or _encoding(device)
    with tempfile.TemporaryDirectory(prefix="maxport-gates-") as temp:
        judged = None
        if checkpoint is not None and not checkpoint.other_weights:
            judged = judged_weights(
                checkpoint,
                Path(temp),
                twin=twin or checkpoint.revision is not None,
                encoding=encoding,
                kernels=False,
                remote=trust_remote_code,
            )
        steps = run_probe(
            folder,
            subject.class_name,
            model=judged.folder if judged else None,
            device=device,
            encoding=encoding,
            limit_s=limit_s,
            headers=_headers(checkpoint) if judged and judged.kind == "twin" else (),
        )
    subject = dataclasses.replace(subject, steps=steps, twin=judged.note if judged else "")
    return [gate(subject) for _name, gate in GATES]


def _headers(checkpoint: Checkpoint | None) -> list[tuple[str, tuple[int, ...]]]:
    tensors = checkpoint.tensors if checkpoint is not None else {}
    return [(name, tensor.shape) for name, tensor in tensors.items()]


def _open(
    model: str, revision: str | None, trust: bool
) -> tuple[Checkpoint | None, dict[str, Any], MaxportError | None]:
    """The checkpoint, or what is wrong with its weights if it has at least a config.json."""
    try:
        checkpoint = open_checkpoint(
            model, revision=revision, trust_remote_code=trust, inspect_only=True
        )
    except MaxportError as error:
        path = Path(model) / "config.json"
        try:
            config = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            raise error from None
        if not isinstance(config, dict):
            raise
        return None, config, error
    return checkpoint, checkpoint.config, None


def _class_name(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _encoding(device: str) -> str:
    """What MAX serves an unquantised checkpoint in: float32 on CPU, else bfloat16."""
    return "float32" if device == "cpu" else "bfloat16"
