"""Runs `maxport.engine.port_probe` in a fresh process and reads what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxport.children import child_environment
from maxport.gates.base import Step


def run_probe(
    port: Path,
    class_name: str,
    *,
    model: Path | None,
    device: str,
    encoding: str,
    limit_s: float,
    headers: Sequence[tuple[str, Sequence[int]]] = (),
) -> dict[str, Step]:
    """Import the port, look it up and build its graph, in a process of its own.

    Args:
        port: The port directory.
        class_name: `architectures[0]` of the checkpoint.
        model: Folder with config and weights; without it no graph is built.
        device: `cpu` or `gpu`.
        encoding: Dtype the graph is built in.
        limit_s: Seconds after which the process is stopped: tracing can loop for ever.
        headers: Names and shapes of the checkpoint's tensors, where `model` is only a twin.

    Returns:
        The steps that were reached, by name.
    """
    with tempfile.TemporaryDirectory(prefix="maxport-gates-") as folder:
        out = Path(folder) / "steps.jsonl"
        command = [sys.executable, "-m", "maxport.engine.port_probe", str(port), class_name]
        command += [str(out), "--device", device, "--encoding", encoding]
        if model is not None:
            command += ["--model", str(model)]
        if headers:
            listed = Path(folder) / "headers.json"
            listed.write_text(json.dumps([[name, list(shape)] for name, shape in headers]))
            command += ["--headers", str(listed)]
        how, code = _run(command, limit_s)
        lines = out.read_text("utf-8").splitlines() if out.exists() else []
    return read_steps([json.loads(line) for line in lines], how, code)


def _run(command: list[str], limit_s: float) -> tuple[str, str]:
    """Empty strings if the process ended well, else why it did not and the end of its output."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s: stopped", ""
    if done.returncode == 0:
        return "", ""
    tail = " ".join(done.stderr.split())[-300:]
    return f"the process ended with code {done.returncode}", tail


def read_steps(lines: list[dict[str, Any]], how: str = "", tail: str = "") -> dict[str, Step]:
    """The steps of a probe from the lines it wrote; one that began and did not end was stopped."""
    steps: dict[str, Step] = {}
    for line in lines:
        name, state = line.pop("step"), line.pop("state")
        if state == "begin":
            line = {"error": "Stopped", "message": how or "the process ended", "tail": tail}
            state = "stopped"
        steps[name] = Step(name, state, line)
    if not steps:
        facts = {"error": "Stopped", "message": f"{how} {tail}".strip()}
        steps["import"] = Step("import", "stopped", facts)
    return steps
