"""What gates look at and what they report."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from maxport.checkpoint import Checkpoint
from maxport.errors import MaxportError

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what, where, and what to do about it."""

    what: str
    where: str = ""
    fix: str = ""
    level: Level = "error"


@dataclass(frozen=True)
class GateResult:
    """One gate's outcome.

    Args:
        gate: The gate's name.
        summary: What it looked at, shown where it found nothing.
        findings: What is wrong; warnings do not fail the gate.
        not_run: Why the gate could not look, or empty; that counts as a failure.
    """

    gate: str
    summary: str = ""
    findings: tuple[Finding, ...] = ()
    not_run: str = ""

    @property
    def passed(self) -> bool:
        """Whether the gate looked and found no error."""
        return not self.not_run and not any(f.level == "error" for f in self.findings)


@dataclass(frozen=True)
class Step:
    """One step of the probe: how it ended and the facts it found."""

    name: str
    state: Literal["ok", "error", "stopped"]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Port:
    """A port directory's sources; its tests are not part of what MAX loads."""

    folder: Path

    @cached_property
    def sources(self) -> dict[str, str]:
        """Text of every Python file of the port, by path below the folder."""
        files = [file.relative_to(self.folder) for file in sorted(self.folder.rglob("*.py"))]
        return {
            str(file): (self.folder / file).read_text("utf-8", errors="replace")
            for file in files
            if file.parts[0] != "tests"
        }

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Syntax trees of the files that parse."""
        trees = {}
        for name, text in self.sources.items():
            try:
                trees[name] = ast.parse(text)
            except SyntaxError:
                continue  # the import gate reports it
        return trees

    def place(self, file: str, node: ast.AST | int) -> str:
        """`file:line` for a message."""
        line = node if isinstance(node, int) else getattr(node, "lineno", 0)
        return f"{file}:{line}"


@dataclass(frozen=True)
class Subject:
    """Everything a gate may look at.

    Args:
        port: The port's sources.
        class_name: `architectures[0]` of the checkpoint's config.json.
        config: The checkpoint's config.json.
        checkpoint: The checkpoint the port is for; None if it cannot be opened.
        trouble: Why the checkpoint cannot be opened, or None.
        steps: What the probe found, by step.
        device: `cpu` or `gpu`, the device the graph is built for.
        twin: Why the graph was built for a small random twin; empty if for the checkpoint.
    """

    port: Port
    class_name: str
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None
    trouble: MaxportError | None
    steps: Mapping[str, Step]
    device: str = "cpu"
    twin: str = ""

    def facts(self, step: str) -> dict[str, Any] | None:
        """The facts of a step that ended well, else None."""
        found = self.steps.get(step)
        return found.facts if found and found.state == "ok" else None

    def why_not(self, step: str) -> str:
        """Why a step has no facts."""
        found = self.steps.get(step)
        if found is None:
            return "an earlier step failed"
        if found.state == "stopped":
            return str(found.facts.get("message", "the process ended"))
        return f"{found.facts.get('error')}: {found.facts.get('message')}"

    def failing_line(self, step: str) -> str:
        """The last line of the port that a failed step passed through, or empty."""
        frames = self.steps[step].facts.get("frames", []) if step in self.steps else []
        for file, line in reversed(frames):
            path = Path(file)
            if path.is_relative_to(self.port.folder):
                return f"{path.relative_to(self.port.folder)}:{line}"
        return ""
