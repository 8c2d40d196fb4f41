"""mypy over a migrated package: what the type checker has to say is part of the report."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from maxport.children import child_environment


def type_findings(files: dict[str, str], name: str) -> list[str] | None:
    """mypy's findings over a package, as `file:line: error: ...`; None where mypy is missing.

    What the package imports from MAX is followed, without being judged itself. Starts a process,
    so call it before MAX is imported.

    Args:
        files: Path inside the package -> text.
        name: Name of the package.
    """
    if find_spec("mypy") is None:
        return None
    with tempfile.TemporaryDirectory(prefix="maxport-") as folder:
        for shown, text in files.items():
            path = Path(folder) / name / shown
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        cache = Path(tempfile.gettempdir()) / "maxport-mypy"
        command = [sys.executable, "-m", "mypy", name, "--ignore-missing-imports"]
        command += ["--follow-imports=silent", "--no-error-summary", f"--cache-dir={cache}"]
        done = subprocess.run(
            command,
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            env={**child_environment(), "MYPYPATH": folder},
        )
    if done.returncode > 1:
        return [f"mypy failed: {' '.join(done.stderr.split())[:300]}"]
    return [line for line in done.stdout.splitlines() if ": error: " in line]
