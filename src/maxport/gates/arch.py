"""The architecture's registration: encodings, planner, adapters, classes of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

from maxport.gates.base import Finding, GateResult, Subject

NAME = "arch"

#: MAX's name of the encoding in which a safetensors dtype is served.
ENCODING = {"F32": "float32", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
CONFIG_DTYPE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def check(subject: Subject) -> GateResult:
    """Every fact of every architecture the port registers for this checkpoint."""
    facts = subject.facts("arch")
    if facts is None:
        return GateResult(NAME, not_run=subject.why_not("arch"))
    findings: list[Finding] = []
    for arch in facts["architectures"]:
        findings += [*_parts(arch), *_encodings(subject, arch)]
    findings += _config_dtype(subject)
    first = facts["architectures"][0]
    summary = f"{'/'.join(first['encodings'])}, {first['planner']}, {first['batching']}"
    return GateResult(NAME, summary, tuple(findings))


def _parts(arch: dict[str, Any]) -> list[Finding]:
    findings = []
    if arch["kv_cache"] and arch["planner"] is None:
        findings.append(
            Finding(
                f"{arch['name']} has no memory_planner: MAX plans no activation memory and infers "
                "no batch size",
                "arch.py",
                "memory_planner=PagedMemoryPlanner (max.pipelines.kv_cache.memory_planner)",
            )
        )
    if arch["kv_cache"] and arch["batching"] is None:
        what = f"{arch['name']} has no batch processor: MAX cannot prepare its inputs"
        findings.append(Finding(what, "arch.py", "set batching= to the donor's batch processor"))
    if arch["shared_with"]:
        others = ", ".join(arch["shared_with"])
        findings.append(
            Finding(
                f"{arch['pipeline_model']} also serves {others}: registering the port changes "
                "their batch processor",
                "arch.py",
                "give the port a PipelineModel class of its own, a subclass is enough",
            )
        )
    if "safetensors" not in arch["adapters"]:
        what = f"{arch['name']} has no weight adapter for safetensors"
        fix = "weight_adapters={WeightsFormat.safetensors: ...}, unless all names agree as they are"
        findings.append(Finding(what, "arch.py", fix, "warning"))
    if arch["default_encoding"] not in arch["encodings"]:
        what = f"default_encoding {arch['default_encoding']} is none of supported_encodings"
        findings.append(Finding(what, "arch.py", "add it to supported_encodings"))
    return findings


def stored_dtype(subject: Subject) -> str:
    """The safetensors dtype that most of the checkpoint's elements are stored in, or empty."""
    if subject.checkpoint is None:
        return ""
    counts: Counter[str] = Counter()
    for tensor in subject.checkpoint.tensors.values():
        counts[tensor.dtype] += tensor.end - tensor.start
    return counts.most_common(1)[0][0] if counts else ""


def _encodings(subject: Subject, arch: dict[str, Any]) -> list[Finding]:
    stored = stored_dtype(subject)
    wanted = ENCODING.get(stored)
    if not stored or wanted in arch["encodings"]:
        return []
    if wanted in ("float32", "bfloat16") and {"float32", "bfloat16"} & set(arch["encodings"]):
        served = " or ".join(arch["encodings"])
        what = f"tensors are stored as {stored}, the port serves {served}: MAX casts at load"
        fix = f'add "{wanted}" to supported_encodings to serve it as stored'
        return [Finding(what, "arch.py", fix, "warning")]
    what = f"tensors are stored as {stored}, which {arch['name']} does not serve"
    fix = f'add "{wanted}" to supported_encodings' if wanted else "convert the checkpoint"
    return [Finding(what, "arch.py", fix)]


def _config_dtype(subject: Subject) -> list[Finding]:
    """config.json's dtype against the tensors': MAX plans memory by the one and loads the other."""
    stored = CONFIG_DTYPE.get(stored_dtype(subject))
    said = subject.config.get("dtype") or subject.config.get("torch_dtype")
    if not stored or not isinstance(said, str) or said.removeprefix("torch.") == stored:
        return []
    what = f"tensors are stored as {stored}, config.json says {said}: MAX plans memory for {said}"
    fix = f'serve with --quantization-encoding, or set "dtype": "{stored}" in config.json'
    return [Finding(what, "config.json", fix, "warning")]
