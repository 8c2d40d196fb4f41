"""Every proof of a migrated package: each class it registers, then the compiled run.

The compiled run has a process of its own: the proofs may simulate GPUs, and a process that does
cannot run compiled graphs. It is started before MAX is imported and waits until it is asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from maxport.children import child_environment
from maxport.errors import MaxportError
from maxport.migrate.package import Migrated
from maxport.migrate.twins import make_twin, registered_names
from maxport.migrate.write import write_package


def prove_all(result: Migrated, place: Path | None, *, compiling: bool = False) -> dict[str, Any]:
    """Prove a package for every class that its V2 code registers; imports MAX.

    Args:
        result: The migration.
        place: Where the package was written; None proves a temporary copy.
        compiling: Also compile and run what was proven first, on the CPU.

    Returns:
        `Proof.to_json()` of the first class that is not proven equal, else of the first; with
        `proofs`, class -> summary, where there are several, and `compiled` where that was run.
    """
    names = list(dict.fromkeys(registered_names(result.plan.target)))
    if not names:
        return _unproven("registers no architecture to build")
    with tempfile.TemporaryDirectory(prefix="maxport-") as text:
        folder = Path(text)
        package = place
        if package is None:
            package = folder / result.plan.name
            write_package(result.files, package)
        child = _Compiling(result.plan.target.path, package) if compiling else None
        try:
            return _proofs(result, package, folder, names, child)
        finally:
            if child:
                child.close()


def _proofs(
    result: Migrated, package: Path, folder: Path, names: list[str], child: _Compiling | None
) -> dict[str, Any]:
    from maxport.migrate.prove import prove

    bodies: dict[str, dict[str, Any]] = {}
    twins: dict[str, Path] = {}
    for name in names:
        try:
            twins[name] = make_twin(name, folder / name)
        except MaxportError as error:
            bodies[name] = _unproven(error.what)
            continue
        bodies[name] = prove(result.plan, package, name, twins[name]).to_json()
    judged = [name for name in names if name in twins]
    wrong = [name for name in judged if bodies[name]["verdict"] != "equal"]
    chosen = (wrong or judged or names)[0]
    body = bodies[chosen]
    if len(names) > 1:
        body["proofs"] = {name: found["summary"] for name, found in bodies.items()}
    if child and body["verdict"] == "equal":
        body["compiled"] = child.result(chosen, twins[chosen])
    return body


def _unproven(why: str) -> dict[str, Any]:
    return {"verdict": "error", "why": why, "summary": f"error: {why}"}


class _Compiling:
    """`maxport.migrate.compiled` in a process of its own, waiting for its task on stdin."""

    def __init__(self, target: Path, package: Path) -> None:
        command = [sys.executable, "-m", "maxport.migrate.compiled", str(target), str(package)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )

    def result(self, class_name: str, twin: Path) -> dict[str, Any]:
        """The compiled run's report; an error's text under `error` where it failed."""
        out, err = self.process.communicate(json.dumps([class_name, str(twin)]))
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if self.process.returncode == 0 and lines:
            return dict(json.loads(lines[-1]))
        said = [line for line in err.splitlines() if line.strip()] or ["it said nothing"]
        return {"equal": False, "error": said[-1][:400]}

    def close(self) -> None:
        """End the process if it was never asked."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
