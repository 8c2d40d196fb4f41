"""The weight adapter's result against the graph's parameters: names, shapes and dtypes."""

from __future__ import annotations

import re
from typing import Any

from maxport.gates.base import Finding, GateResult, Subject

NAME = "weights"
SHOWN = 4


def check(subject: Subject) -> GateResult:
    """Both directions: a weight that no parameter takes is ignored by MAX without a word."""
    facts = subject.facts("weights")
    if facts is None or "declared" not in facts:
        reason = subject.why_not("build last") if "build last" in subject.steps else ""
        return GateResult(NAME, not_run=reason or "no graph was built")
    declared, provided = facts["declared"], facts["provided"]
    findings = [*_names(declared, provided), *_signatures(declared, provided)]
    findings += _real_names(subject, declared)
    if facts.get("changed"):
        findings.append(
            Finding(
                f"running the adapter on its own result changes it: {_some(facts['changed'])}",
                "weight_adapters.py",
                "leave a name that is already the graph's as it is",
                "warning",
            )
        )
    summary = f"{len(declared)} parameters, {len(provided)} weights, all agree"
    return GateResult(NAME, summary, tuple(findings))


def _names(declared: dict[str, Any], provided: dict[str, Any]) -> list[Finding]:
    findings = []
    if missing := [name for name in declared if name not in provided]:
        fix = (
            "map the checkpoint's tensor to this name; if there is none, the module must not hold "
            "it: plain lists and Tensors kept on self become parameters"
        )
        what = f"{len(missing)} parameters get no weight: {_some(missing)}"
        findings.append(Finding(what, "weight_adapters.py", fix))
    if extra := [name for name in provided if name not in declared]:
        fix = "load it in the graph, or drop it by name in the adapter with the reason"
        what = f"{len(extra)} weights go nowhere, MAX ignores them silently: {_some(extra)}"
        findings.append(Finding(what, "weight_adapters.py", fix))
    return findings


def _real_names(subject: Subject, declared: dict[str, Any]) -> list[Finding]:
    """The checkpoint's own tensor names, where the graph was built on a twin's weights."""
    if "names" not in subject.steps:
        return []
    facts = subject.facts("names")
    if facts is None:
        what = f"the adapter refuses the checkpoint's names: {subject.why_not('names')}"
        return [Finding(what, "weight_adapters.py", "see `maxport list-keys --summary`")]
    here = {pattern(name) for name in declared}
    there = {pattern(name) for name in facts["adapted"]}
    heads = {name for name in here ^ there if "{i}" not in name}
    if len(heads) == 1:
        # One matrix beside the embedding: a head that the port ties by the loaded weights.
        here, there = here - heads, there - heads
    findings = []
    if missing := sorted(here - there):
        what = f"the checkpoint has no tensors for {_some(missing)}"
        findings.append(Finding(what, "weight_adapters.py", "map its names to these"))
    if extra := sorted(there - here):
        what = f"the checkpoint's tensors {_some(extra)} go nowhere"
        findings.append(Finding(what, "weight_adapters.py", "load them or drop them by name"))
    return findings


def pattern(name: str) -> str:
    """A name with every number in it replaced."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name)


def _signatures(declared: dict[str, Any], provided: dict[str, Any]) -> list[Finding]:
    findings = []
    both = [name for name in declared if name in provided]
    if shapeless := [name for name in both if provided[name][0] is None]:
        what = f"WeightData.shape is no max.graph.Shape: {_some(shapeless)}"
        findings.append(Finding(what, "weight_adapters.py", "WeightData(..., Shape(array.shape))"))
    shapes = [
        f"{name} {provided[name][0]} for {declared[name][0]}"
        for name in both
        if provided[name][0] is not None and provided[name][0] != declared[name][0]
    ]
    if shapes:
        transposed = all(
            _transposed(declared[n][0], provided[n][0])
            for n in both
            if _differ(n, declared, provided)
        )
        fix = (
            "transpose them in the adapter" if transposed else "check fusing order and config sizes"
        )
        what = f"{len(shapes)} weights have another shape than their parameter: {_some(shapes)}"
        findings.append(Finding(what, "weight_adapters.py", fix))
    dtypes = [
        f"{name} {provided[name][1]} for {declared[name][1]}"
        for name in both
        if provided[name][1] != declared[name][1]
    ]
    if dtypes:
        what = f"{len(dtypes)} weights have another dtype than their parameter: {_some(dtypes)}"
        fix = "cast in _prepare_state_dict: weight.astype(config.dtype)"
        findings.append(Finding(what, "model.py", fix))
    return findings


def _differ(name: str, declared: dict[str, Any], provided: dict[str, Any]) -> bool:
    return provided[name][0] is not None and declared[name][0] != provided[name][0]


def _transposed(one: list[int], other: list[int]) -> bool:
    return len(one) == 2 and one == other[::-1]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
