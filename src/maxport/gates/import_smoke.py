"""The port imports as MAX imports it, in a fresh process, and shows its ARCHITECTURES."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from maxport.gates.base import Finding, GateResult, Port, Subject

NAME = "import"


def check(subject: Subject) -> GateResult:
    """Package layout and syntax by reading, the import itself from the probe."""
    port = subject.port
    findings = [*_layout(port), *_syntax(port)]
    facts = subject.facts("import")
    if facts is None and not findings:
        findings.append(_import_error(subject))
    names = ", ".join(facts["names"]) if facts else ""
    return GateResult(NAME, f"imports in a fresh process; registers {names}", tuple(findings))


def _layout(port: Port) -> list[Finding]:
    """Faults of the folder itself."""
    folder = port.folder
    if not (folder / "__init__.py").is_file():
        below = sorted(
            child.name
            for child in folder.iterdir()
            if (child / "__init__.py").is_file()
            and "ARCHITECTURES" in (child / "__init__.py").read_text("utf-8", errors="replace")
        )
        fix = f"pass {folder / below[0]}" if below else "add an __init__.py with ARCHITECTURES"
        what = "the folder that holds ports was passed, not a port" if below else "no __init__.py"
        return [Finding(what, str(folder), fix)]
    if not folder.name.isidentifier():
        fix = "rename it: letters, digits and underscores"
        return [Finding(f"folder name {folder.name!r} is no Python package name", str(folder), fix)]
    taken = _shadowed_by(folder)
    if taken:
        what = f"an installed package is called {folder.name!r}: MAX would import that one"
        return [Finding(what, taken, f"rename the folder, e.g. {folder.name}_port")]
    return []


def _shadowed_by(folder: Path) -> str:
    """Where Python finds another package of the port's name, or empty."""
    found = importlib.util.find_spec(folder.name)
    if found is None or (found.origin is None and found.submodule_search_locations):
        return ""  # a plain folder of that name does not hide a package
    places = [*(found.submodule_search_locations or ()), found.origin or "built in"]
    return "" if Path(places[0]).resolve() == folder.resolve() else str(places[0])


def _syntax(port: Port) -> list[Finding]:
    findings = []
    for name, text in port.sources.items():
        try:
            ast.parse(text)
        except SyntaxError as error:
            findings.append(Finding(f"syntax error: {error.msg}", f"{name}:{error.lineno}"))
    return findings


def _import_error(subject: Subject) -> Finding:
    """What the failed import means, for the faults that have one known cause."""
    why = subject.why_not("import")
    where = subject.failing_line("import") or "__init__.py"
    if "beyond top-level package" in why:
        fix = "import from the port's own folder (`from .x`) or from `max`, nothing above the port"
        return Finding("a relative import leaves the port's package", where, fix)
    if "no attribute 'ARCHITECTURES'" in why:
        fix = "in __init__.py: ARCHITECTURES = [the SupportedArchitecture of arch.py]"
        return Finding("__init__.py has no ARCHITECTURES", "__init__.py", fix)
    if "did not expose an `ARCHITECTURES` list" in why:
        fix = "ARCHITECTURES must be a list with at least one SupportedArchitecture"
        return Finding("ARCHITECTURES is empty or not a list", "__init__.py", fix)
    return Finding(f"the import fails: {why}", where, "fix the error; MAX would fail the same way")
