"""Which architecture answers when MAX is asked for this checkpoint."""

from __future__ import annotations

from maxport.gates.base import Finding, GateResult, Subject

NAME = "registry"
SUFFIX = "_ModuleV3"


def check(subject: Subject) -> GateResult:
    """The port must answer, and must not take the place of an architecture MAX has itself."""
    answers, imported = subject.facts("registry"), subject.facts("import")
    if answers is None or imported is None:
        return GateResult(NAME, not_run=subject.why_not("registry"))
    if not subject.class_name:
        return GateResult(NAME, not_run="config.json names no architecture")
    default, v3 = answers["default"], answers["v3"]
    findings = [*_silent(subject, answers, imported["names"])]
    findings += _overrides(subject, imported)
    with_flag = " with --prefer-module-v3" if not default["port"] and v3["port"] else ""
    name = (v3 if with_flag else default)["name"]
    return GateResult(NAME, f"{name} answers for {subject.class_name}{with_flag}", tuple(findings))


def _silent(subject: Subject, answers: dict, names: list[str]) -> list[Finding]:
    """The port does not answer at all; MAX's own architecture may do so in its place."""
    default, v3 = answers["default"], answers["v3"]
    if default["port"] or v3["port"]:
        return []
    wanted = subject.class_name
    other = default["name"] or v3["name"]
    instead = f"MAX's own {other} answers in its place" if other else "nothing answers"
    fix = f'set name="{wanted}{SUFFIX if other else ""}" in arch.py'
    what = f"the port registers {', '.join(names)}, the checkpoint says {wanted}: {instead}"
    return [Finding(what, "arch.py", fix)]


def _overrides(subject: Subject, imported: dict) -> list[Finding]:
    """A port under the name of a class MAX has takes its place with no more than a log line."""
    name = subject.class_name
    if name not in imported["names"] or name not in imported["native"]:
        return []
    fix = f'name="{name}{SUFFIX}", and serve with --prefer-module-v3'
    return [Finding(f"the port replaces MAX's own {name}", "arch.py", fix)]
