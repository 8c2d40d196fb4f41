"""What `maxport doctor` examines: packages, devices, memory, caches."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from maxport.checkpoint import cache_root
from maxport.engine.devices import memory_free
from maxport.engine.registry import check_max_version
from maxport.errors import MaxportError


def examine() -> dict[str, Any]:
    """All findings as JSON-ready values; `problems` lists what keeps a command from working."""
    versions = [_python(), *(_package(name, spec) for name, spec in requirements())]
    problems = [_problem(row) for row in versions if not row["ok"]]
    devices: list[str] = []
    if all(row["ok"] for row in versions if row["package"] == "max"):
        problems += _try_max()
    if not problems:
        from maxport.engine.devices import devices as found

        devices = [device.name for device in found()]
    caches = [_cache(*pair) for pair in _cache_folders()]
    problems += [
        {"what": f"the cache {c['path']} is not writable", "fix": "change its owner or mode"}
        for c in caches
        if not c["writable"]
    ]
    return {
        "versions": versions,
        "devices": devices,
        "memory_free_bytes": memory_free(),
        "caches": caches,
        "problems": problems,
    }


def requirements() -> list[tuple[str, str]]:
    """(package, version specifier) of everything maxport needs to run, from its own metadata."""
    found = []
    for line in importlib.metadata.requires("maxport") or []:
        head, _, marker = line.partition(";")
        if "extra" in marker:
            continue
        match = re.match(r"\s*([\w.-]+)(?:\[[^\]]*\])?\s*(.*)", head)
        if match:
            found.append((match.group(1), match.group(2).strip()))
    return sorted(found)


def _python() -> dict[str, Any]:
    wanted = str(importlib.metadata.metadata("maxport")["Requires-Python"] or "")
    return _row("python", platform.python_version(), wanted)


def _package(name: str, wanted: str) -> dict[str, Any]:
    try:
        installed: str | None = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    return _row(name, installed, wanted)


def _row(name: str, installed: str | None, wanted: str) -> dict[str, Any]:
    from packaging.specifiers import SpecifierSet

    ok = installed is not None and SpecifierSet(wanted).contains(installed, prereleases=True)
    return {"package": name, "installed": installed, "wanted": wanted, "ok": ok}


def _problem(row: dict[str, Any]) -> dict[str, str]:
    name, wanted = row["package"], row["wanted"]
    have = f"{row['installed']} is installed" if row["installed"] else "it is not installed"
    fix = f"use a Python {wanted}" if name == "python" else f'pip install "{name}{wanted}"'
    return {"what": f"{name} {wanted} is needed, {have}".replace("  ", " "), "fix": fix}


def _try_max() -> list[dict[str, str]]:
    """Whether MAX imports and its serving parts are complete."""
    try:
        check_max_version()
    except MaxportError as error:
        return [{"what": error.what, "fix": error.fix}]
    except Exception as error:
        return [{"what": f"MAX does not import: {type(error).__name__}: {error}", "fix": ""}]
    return []


def _cache_folders() -> list[tuple[str, Path]]:
    from maxport.engine.devices import max_cache

    hub = os.environ.get("HF_HUB_CACHE")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return [
        ("maxport", cache_root()),
        ("MAX", max_cache()),
        ("Hugging Face", Path(hub) if hub else home / "hub"),
    ]


def _cache(name: str, path: Path) -> dict[str, Any]:
    """Size of a cache folder, links not followed, and whether it can be written or made."""
    exists = path.is_dir()
    size = 0
    if exists:
        files = (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        size = sum(file.stat().st_size for file in files)
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    writable = os.access(nearest, os.W_OK) and nearest.is_dir()
    return {"name": name, "path": str(path), "exists": exists, "bytes": size, "writable": writable}
