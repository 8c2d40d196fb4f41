"""The checkpoint's files are whole and in a format MAX loads."""

from __future__ import annotations

from collections import Counter

from maxport.gates.base import Finding, GateResult, Subject

NAME = "files"


def check(subject: Subject) -> GateResult:
    """What opening the checkpoint found, and the tokenizer's files."""
    checkpoint, trouble = subject.checkpoint, subject.trouble
    if trouble is not None:
        finding = Finding(trouble.what, trouble.where, trouble.fix)
        return GateResult(NAME, findings=(finding,))
    assert checkpoint is not None
    findings = []
    if not checkpoint.tensors:
        others = ", ".join(checkpoint.other_weights)
        if others:
            what = f"the weights are not in safetensors: {others}"
            fix = "convert them: model.save_pretrained(folder) in transformers"
            findings.append(Finding(what, str(checkpoint.folder), fix))
        else:
            what = "no weights: the graph is built on a small random twin"
            fix = "none needed before serving"
            findings.append(Finding(what, str(checkpoint.folder), fix, "warning"))
    if not checkpoint.tokenizer_files:
        what = "no tokenizer files: MAX cannot serve text"
        fix = "copy tokenizer.json and tokenizer_config.json beside config.json"
        findings.append(Finding(what, str(checkpoint.folder), fix, "warning"))
    dtypes = Counter(tensor.dtype for tensor in checkpoint.tensors.values())
    files = len({tensor.file for tensor in checkpoint.tensors.values()})
    stored = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
    return GateResult(NAME, f"{files} safetensors file(s): {stored}", tuple(findings))
