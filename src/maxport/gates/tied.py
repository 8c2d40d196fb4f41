"""Whether the head is the embedding: config.json, the checkpoint's tensors and the graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from maxport.gates.base import Finding, GateResult, Subject

NAME = "tied head"


def check(subject: Subject) -> GateResult:
    """The checkpoint's tensors decide; config.json may be wrong in either direction."""
    checkpoint, facts = subject.checkpoint, subject.facts("weights")
    if facts is None or "declared" not in facts:
        return GateResult(NAME, not_run="no graph was built")
    if checkpoint is None or not checkpoint.tensors:
        return GateResult(NAME, "no tensors to compare config.json with")
    vocab = _vocab_size(subject.config)
    if subject.twin:
        stored = tables({n: t.shape for n, t in checkpoint.tensors.items()}, vocab)
        return GateResult(NAME, f"{len(stored)} in the checkpoint", tuple(_config(subject, stored)))
    stored = tables({n: t.shape for n, t in checkpoint.tensors.items()}, vocab)
    declared = tables({n: s[0] for n, s in facts["declared"].items()}, vocab)
    findings = [*_graph(stored, declared, facts["provided"]), *_config(subject, stored)]
    how = "the embedding is the head" if len(declared) == 1 else "the head has its own weight"
    return GateResult(NAME, f"{how}, as in the checkpoint", tuple(findings))


def tables(shapes: Mapping[str, Iterable[int]], vocab: int) -> list[str]:
    """Names of the matrices with a row per token that belong to no layer: embedding and head."""
    return [
        name
        for name, shape in shapes.items()
        if len(list(shape)) == 2
        and vocab <= next(iter(shape)) < vocab + 2048
        and not re.search(r"(^|\.)\d+\.", name)
    ]


def _vocab_size(config: Mapping[str, Any]) -> int:
    for part in (config, *(v for v in config.values() if isinstance(v, dict))):
        if isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return 1 << 62


def _graph(stored: list[str], declared: list[str], provided: Mapping[str, Any]) -> list[Finding]:
    """The graph against the checkpoint."""
    if len(declared) > len(stored):
        head = next((name for name in declared if name not in provided), declared[-1])
        what = f"the graph has its own head {head}, the checkpoint stores only {', '.join(stored)}"
        fix = "decide by the loaded weights: tied = the head's name is not in state_dict"
        return [Finding(what, "model_config.py", fix)]
    if len(declared) < len(stored) and len(tables_provided := _kept(provided, declared)) > 0:
        what = f"the checkpoint has a head of its own ({tables_provided[0]}) that the graph ignores"
        fix = "decide by the loaded weights: tied = the head's name is not in state_dict"
        return [Finding(what, "model_config.py", fix)]
    return []


def _kept(provided: Mapping[str, Any], declared: list[str]) -> list[str]:
    """Weights of the embedding's shape that no parameter takes."""
    shapes = [provided[name][0] for name in declared if name in provided]
    return [
        name
        for name, (shape, _dtype) in provided.items()
        if name not in declared and shape in shapes and not re.search(r"(^|\.)\d+\.", name)
    ]


def _config(subject: Subject, stored: list[str]) -> list[Finding]:
    """config.json against the checkpoint."""
    said = subject.config.get("tie_word_embeddings")
    if not isinstance(said, bool) or not stored or said == (len(stored) == 1):
        return []
    found = " and ".join(stored)
    what = f"config.json says tie_word_embeddings={str(said).lower()}, the checkpoint has {found}"
    return [Finding(what, "config.json", "none needed: the tensors decide", "warning")]
