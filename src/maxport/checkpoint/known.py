"""What the installed transformers knows, read from its source files without importing it.

Importing transformers costs seconds; these tables are literals in a few files, so `ast` is enough.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from maxport.errors import MaxportError


@cache
def known_model_types() -> frozenset[str]:
    """Every `model_type` that transformers' AutoConfig resolves.

    Source: CONFIG_MAPPING_NAMES in transformers/models/auto/{auto_mappings,configuration_auto}.py.

    Raises:
        MaxportError: transformers is not installed, or its tables have moved.
    """
    names: set[str] = set()
    for file in ("auto_mappings.py", "configuration_auto.py"):
        for first, _ in _pairs(file, "CONFIG_MAPPING_NAMES"):
            names.add(first)
    return frozenset(_nonempty(names, "CONFIG_MAPPING_NAMES"))


@cache
def known_architectures() -> frozenset[str]:
    """Every model class name in transformers' auto-model tables.

    Source: the MODEL_*_MAPPING_NAMES tables of transformers/models/auto/modeling_auto.py.
    """
    names = {second for _, second in _pairs("modeling_auto.py", "MAPPING_NAMES")}
    return frozenset(_nonempty(names, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))


@cache
def causal_lm_classes() -> dict[str, str]:
    """model_type -> class name of transformers' causal-LM table."""
    pairs = _pairs("modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    _nonempty({first for first, _ in pairs}, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return dict(pairs)


@cache
def attribute_map(model_type: str) -> dict[str, str]:
    """Common name -> this model's own config key, as its config class declares (n_embd and such).

    Source: `attribute_map` of the class in transformers/models/*/configuration_*.py. Empty for a
    model type that transformers does not know or that maps nothing.
    """
    first = {key: value for key, value in _pairs("auto_mappings.py", "CONFIG_MAPPING_NAMES")}
    moved = dict(_pairs("auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"))
    name = moved.get(model_type, model_type.replace("-", "_"))
    path = _root() / "models" / name / f"configuration_{name}.py"
    wanted = first.get(model_type)
    if wanted is None or not path.is_file():
        return {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == wanted:
            for statement in node.body:
                if _target(statement) == "attribute_map":
                    value = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
                    return dict(value)
    return {}


def _pairs(file: str, table: str) -> list[tuple[str, str]]:
    """String pairs written in the assignments to, and updates of, tables named like `table`."""
    found: list[tuple[str, str]] = []
    for node in _tree(file).body:
        if table not in _target(node):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Tuple) and len(part.elts) == 2:
                _add(found, part.elts[0], part.elts[1])
            elif isinstance(part, ast.Dict):
                for key, value in zip(part.keys, part.values, strict=True):
                    _add(found, key, value)
    return found


def _add(found: list[tuple[str, str]], key: ast.expr | None, value: ast.expr) -> None:
    if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        return
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
    for item in values:
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            found.append((key.value, item.value))


def _target(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "update"
        and isinstance(node.value.func.value, ast.Name)
    ):
        return node.value.func.value.id
    return ""


def _root() -> Path:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise MaxportError("transformers is not installed", fix='run "pip install maxport"')
    return Path(spec.origin).parent


@cache
def _tree(file: str) -> ast.Module:
    path = _root() / "models" / "auto" / file
    try:
        return ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError) as error:
        raise MaxportError(
            "transformers' table of models is not where this version of maxport expects it",
            where=str(path),
            fix="install the transformers version that maxport pins",
        ) from error


def _nonempty(names: set[str], table: str) -> set[str]:
    if not names:
        raise MaxportError(
            f"transformers' table {table} could not be read",
            fix="install the transformers version that maxport pins",
        )
    return names
