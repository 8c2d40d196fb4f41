"""The line under a table's title: what made it, with which versions, where and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stamp(body: Mapping[str, Any]) -> str:
    """The line for a results file's content: its bench, versions, machine and date."""
    versions = ", ".join(f"{name} {version}" for name, version in body["versions"].items())
    machine = str(body["machine"]).replace("_", "-")
    return f"Made by `python bench/{body['bench']}.py`; {versions}; {machine}; {body['made']}."
