"""What tests of every part need."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jsonschema
import pytest


@pytest.fixture(scope="session")
def valid() -> Callable[[str, str], dict[str, Any]]:
    """Parse a command's JSON report and hold it against the command's committed schema."""

    def parsed(command: str, text: str) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(text)
        schema = (files("maxport.cli") / "schemas" / f"{command}.json").read_text("utf-8")
        jsonschema.validate(body, json.loads(schema))
        return body

    return parsed
