"""How alike two reference implementations are as text: what whoever copies one has to rewrite.

transformers' model files are derived from one another; a shared history shows as shared lines. A
model's lines are those of its class and of everything in the same file that it uses, without
docstrings and comments, and with the family's name taken out, so that a renamed copy is equal.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

Lines = Counter[str]
#: Stands for every line that no donor has.
UNSEEN = ""


def relative_to_transformers(file: str) -> str:
    """A source file's path, below the installed transformers where it lies there."""
    path = Path(file)
    root = _transformers()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _transformers() -> Path:
    spec = find_spec("transformers")
    return Path(spec.origin).parent if spec and spec.origin else Path("/")


@cache
def source_lines(file: str, class_name: str) -> Lines:
    """Lines of a class and of what it uses in its file, each with how often it occurs.

    Args:
        file: As from `relative_to_transformers`.
        class_name: A class in it.

    Returns:
        Empty where the file or the class cannot be read.
    """
    try:
        tree = ast.parse((_transformers() / file).read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return Counter()
    every = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    used = _used(every, class_name)
    family = _common_start([n for n in used if isinstance(every[n], ast.ClassDef)])
    lines: Lines = Counter()
    for name in used:
        _drop_docstrings(every[name])
        for line in ast.unparse(every[name]).splitlines():
            text = line.strip().replace(family, "*") if family else line.strip()
            if text not in ("", "pass"):
                lines[text] += 1
    return lines


def _used(every: Mapping[str, ast.AST], start: str) -> set[str]:
    """Definitions reached by name from one of them."""
    seen: set[str] = set()
    stack = [start]
    while stack:
        name = stack.pop()
        if name in every and name not in seen:
            seen.add(name)
            stack += [n.id for n in ast.walk(every[name]) if isinstance(n, ast.Name)]
    return seen


def _common_start(names: list[str]) -> str:
    """The letters that all names begin with: the family's name in a model file."""
    first, last = min(names, default=""), max(names, default="")
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]


def _drop_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [s for s in body if not _is_text(s)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def rarity(sources: Iterable[Lines]) -> dict[str, float]:
    """How much a line says about descent: 1 for one that all have, more for one that few have."""
    rows = list(sources)
    seen = Counter(line for lines in rows for line in lines)
    found = {line: 1 + math.log((len(rows) + 1) / (n + 0.5)) for line, n in seen.items()}
    return found | {UNSEEN: 1 + math.log((len(rows) + 1) / 0.5)}


def likeness(one: Lines, other: Lines, weights: Mapping[str, float]) -> float:
    """Share of both texts that they have in common, between 0 and 1 (Dice, weighted).

    Args:
        one: A model's lines.
        other: A donor's.
        weights: From `rarity` over the donors.
    """

    def size(lines: Lines) -> float:
        return sum(n * weights.get(line, weights[UNSEEN]) for line, n in lines.items())

    whole = size(one) + size(other)
    return 2 * size(one & other) / whole if whole else 0.0
