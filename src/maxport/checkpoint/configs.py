"""config.json and its kin: JSON read with useful errors, and the rules on its content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from maxport.checkpoint.known import known_architectures, known_model_types
from maxport.errors import MaxportError


def parse_object(data: bytes, name: str, where: str) -> dict[str, Any]:
    """A JSON file whose top level must be an object.

    Raises:
        MaxportError: Not UTF-8, not JSON, or not an object; says line and column.
    """
    place = f"{where}/{name}"
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise MaxportError(f"{name} is not UTF-8 text", where=place) from error
    except json.JSONDecodeError as error:
        raise MaxportError(
            f"{name} is not valid JSON: {error.msg}",
            where=f"{place}, line {error.lineno}, column {error.colno}",
            fix=_json_fix(data),
        ) from error
    except RecursionError as error:
        raise MaxportError(f"{name} is nested too deeply", where=place) from error
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", bool: "a boolean"}.get(type(value), "a number")
        if value is None:
            kind = "null"
        raise MaxportError(
            f"{name} must be a JSON object, but it is {kind}",
            where=place,
            fix="use the config.json that was saved with the model",
        )
    return value


def _json_fix(data: bytes) -> str:
    if data.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer: run `git lfs pull` in the checkpoint folder"
    if not data.strip():
        return "the file is empty: download it again"
    return "correct the file or download it again"


def check_portable(config: dict[str, Any], where: str, *, trust_remote_code: bool) -> None:
    """Refuse configs that name no architecture or that need code from the checkpoint to run.

    Raises:
        MaxportError: `architectures` or `model_type` is missing or malformed; or the architecture
            exists only as remote code and `trust_remote_code` is False.
    """
    place = f"{where}/config.json"
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        found = "is missing" if names is None else f"is {json.dumps(names)[:60]}"
        raise MaxportError(
            f"`architectures` {found} in config.json, so the model class is unknown",
            where=place,
            fix='add it, for example "architectures": ["LlamaForCausalLM"]',
        )
    if not model_type_of(config):
        raise MaxportError(
            "`model_type` in config.json is missing or no string",
            where=place,
            fix='add it, for example "model_type": "llama"',
        )
    if needs_remote_code(config) and not trust_remote_code:
        raise MaxportError(
            f"{names[0]} is not part of transformers: the checkpoint brings its own Python code",
            where=f"{place}: auto_map",
            fix="read that code, then pass --trust-remote-code to run it",
        )


def model_type_of(config: Mapping[str, Any]) -> str:
    """`model_type`, or "" where it is missing or no string."""
    value = config.get("model_type")
    return value if isinstance(value, str) else ""


def needs_remote_code(config: Mapping[str, Any]) -> bool:
    """Whether building this model would run code from the checkpoint.

    True if `auto_map` names a config or model class and transformers itself lacks the model type
    or the class in `architectures`. A left-over `auto_map` of a model that transformers has
    adopted since does not count: there its own class is used.
    """
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict):
        return False
    if not any(key == "AutoConfig" or key.startswith("AutoModel") for key in auto_map):
        return False
    if model_type_of(config) not in known_model_types():
        return True
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]) not in known_architectures()
