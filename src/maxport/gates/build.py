"""The graph builds, for every mode in which a pipeline asks for logits."""

from __future__ import annotations

from maxport.gates.base import Finding, GateResult, Subject

NAME = "build"
MODES = ("last", "all", "variable")


def check(subject: Subject) -> GateResult:
    """The dry builds of the probe, without a compile."""
    if "build last" not in subject.steps:
        return GateResult(NAME, not_run=_reason(subject))
    findings = []
    for mode in MODES:
        step = f"build {mode}"
        if subject.facts(step) is not None:
            continue
        if step not in subject.steps:
            continue  # the mode before it ended the process and says so
        findings.append(_failure(subject, mode))
    lane = (subject.facts("build last") or {}).get("lane", "")
    modes = ", ".join(mode for mode in MODES if subject.facts(f"build {mode}") is not None)
    summary = f"{lane} graph builds on {subject.device} for logits {modes}"
    twin = f" ({subject.twin})" if subject.twin else ""
    return GateResult(NAME, summary + twin, tuple(findings))


def _failure(subject: Subject, mode: str) -> Finding:
    step = f"build {mode}"
    where = subject.failing_line(step)
    if subject.steps[step].state == "stopped":
        fix = "look for a Tensor that is unpacked or iterated: both loop for ever while tracing"
        return Finding(
            f"building ({mode} logits) hangs or dies: {subject.why_not(step)}", where, fix
        )
    what = f"the graph does not build ({mode} logits): {subject.why_not(step)}"
    fix = "" if mode == "last" else f"return what ReturnLogits.{mode.upper()} asks for"
    return Finding(what, where, fix)


def _reason(subject: Subject) -> str:
    if subject.checkpoint is None or subject.checkpoint.other_weights:
        return "the checkpoint's weights cannot be read"
    return subject.why_not("import")
