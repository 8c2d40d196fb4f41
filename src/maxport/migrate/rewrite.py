"""What every codemod shares: the record of a rewrite, the file at work, and the transformer base.

Levels are ruff's idea applied to migration:

- `safe`: the code means the same afterwards in every configuration V3 supports.
- `review`: it may mean something else in some configuration; the report says which.
- `manual`: it could not be done; a marked block that fails loudly stands in its place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import libcst as cst
from libcst import metadata

from maxport.migrate.plan import Plan
from maxport.migrate.sources import Definition, Sources

Level = Literal["safe", "review", "manual"]
LEVELS: tuple[Level, ...] = ("safe", "review", "manual")


@dataclass(frozen=True)
class Change:
    """One rewrite: file as shown to the user, line in the V2 source, codemod, level, what."""

    file: str
    line: int
    codemod: str
    level: Level
    what: str


@dataclass
class FileWork:
    """A file on its way from V2 to V3.

    Attributes:
        shown: Path as the report shows it.
        module: Dotted name of the V2 module the text came from; names resolve there.
        original: V2 text, for line numbers and the diff.
        text: Text as it is now.
        plan: What the V3 package is made of, and the judge of names.
        changes: What was done so far.
        needs: Imports the text now needs: (module, name, asname).
        carried: True when the file was brought over from `max.nn` or from a donor architecture.
        facts: What codemods learn and later ones use.
    """

    shown: str
    module: str
    original: str
    text: str
    plan: Plan
    changes: list[Change] = field(default_factory=list)
    needs: set[tuple[str, str, str]] = field(default_factory=set)
    carried: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def sources(self) -> Sources:
        """Parsed V2 modules."""
        return self.plan.kinds.sources

    def resolve(self, name: str) -> Definition:
        """What `name` meant in the V2 module."""
        return self.sources.resolve(self.module, name)

    def kind(self, found: Definition) -> str:
        """How a definition reaches V3; see `kinds`."""
        return self.plan.kinds.of(found)

    def is_layer(self, name: str) -> bool:
        """True for a class of this file that is (or mixes into) a V2 layer."""
        return self.kind(Definition(self.module, name)) == "layer"

    def need(self, module: str, name: str, asname: str = "") -> None:
        """Ask the imports codemod for `from module import name [as asname]`."""
        self.needs.add((module, name, asname))

    def counts(self) -> dict[str, int]:
        """Number of rewrites by level."""
        found = Counter(change.level for change in self.changes)
        return {level: found.get(level, 0) for level in LEVELS}


class Codemod(cst.CSTTransformer):  # type: ignore[misc]
    """Base of the transformers: holds the file, notes changes with V2 line numbers."""

    NAME = "codemod"
    # Text without this pattern needs no visit; empty means always.
    TRIGGER = ""

    def __init__(self, work: FileWork) -> None:
        super().__init__()
        self.work = work
        self.noted: list[tuple[cst.CSTNode | int, Level, str]] = []

    def note(self, node: cst.CSTNode, level: Level, what: str) -> None:
        """Record a rewrite of `node`, which must be a node of the tree being visited."""
        self.noted.append((node, level, what))

    def add(self, line: int, level: Level, what: str) -> None:
        """Record a rewrite at a known V2 line."""
        self.noted.append((line, level, what))

    def settle(self, tree: cst.Module) -> None:
        """Hand what was noted to the file, with lines instead of nodes."""
        if not self.noted:
            return
        lines = line_map(self.work.original, self.work.text)
        positions = _Positions()
        positions._gen_impl(tree)  # alone: resolving through a MetadataWrapper costs three times it
        for at, level, what in self.noted:
            line = at if isinstance(at, int) else 1
            found = None if isinstance(at, int) else positions._computed.get(at)
            if found is not None:
                line = lines.get(found.start.line, found.start.line)
            self.work.changes.append(Change(self.work.shown, line, self.NAME, level, what))


class _Positions(metadata.PositionProvider):  # type: ignore[misc]
    """Where each node of one tree begins and ends, computed only when something was noted."""


def apply(codemod: type[Codemod], work: FileWork) -> None:
    """Run one codemod over a file in place."""
    if codemod.TRIGGER and not re.search(codemod.TRIGGER, work.text):
        return
    tree = cst.parse_module(work.text)  # a parsed tree holds every node once
    made = codemod(work)
    result = tree.visit(made)
    made.settle(tree)
    work.text = result.code


def line_map(original: str, text: str) -> dict[int, int]:
    """Line of `text` -> line of `original` it came from.

    Lines that occur once in both are anchors; the lines between two anchors keep their distance to
    the earlier one, as far as the original reaches. Linear in the number of lines.
    """
    if original == text:
        return {}
    before, after = original.splitlines(), text.splitlines()
    there = _unique(before)
    anchors = {i: there[line] for line, i in _unique(after).items() if line in there}
    mapped: dict[int, int] = {}
    at, base = 0, 0
    for index in range(len(after)):
        found = anchors.get(index)
        if found is not None and found >= base:
            at, base = index, found
        mapped[index + 1] = min(base + index - at, len(before) - 1) + 1
    return mapped


def _unique(lines: list[str]) -> dict[str, int]:
    count = Counter(lines)
    return {line: i for i, line in enumerate(lines) if count[line] == 1 and line.strip()}


def code_of(node: cst.CSTNode) -> str:
    """Source text of a node."""
    return str(cst.Module([]).code_for_node(node))


def dotted(node: cst.BaseExpression | cst.BaseAssignTargetExpression | None) -> str:
    """`a.b.c` of a name or attribute chain; empty for anything else."""
    if isinstance(node, cst.Name):
        return str(node.value)
    if isinstance(node, cst.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr.value}" if head else ""
    return ""


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    """`name=value` as an argument, formatted without blanks."""
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(value, keyword=cst.Name(name), equal=tight)


def relaid(args: Sequence[cst.Arg], like: Sequence[cst.Arg]) -> list[cst.Arg]:
    """`args` laid out as the call they replace: own commas kept, new ones like the call's first.

    A comma carries the comment behind it, so an argument that had one keeps it, and a new argument
    gets the line break without the comment.
    """
    if not args or not like:
        return list(args)
    plain: cst.Comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if len(like) > 1 and isinstance(like[0].comma, cst.Comma):
        plain = like[0].comma
        after = plain.whitespace_after
        if isinstance(after, cst.ParenthesizedWhitespace):
            line = after.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
            plain = plain.with_changes(whitespace_after=after.with_changes(first_line=line))
    last = like[-1].comma
    placed = [
        arg
        if isinstance(arg.comma, cst.Comma) and arg.comma is not last
        else arg.with_changes(comma=plain)
        for arg in args[:-1]
    ]
    return [*placed, args[-1].with_changes(comma=last)]


def parse_statements(code: str) -> list[cst.BaseStatement]:
    """Statements of a piece of code, to splice into a tree; blank lines and comments before the
    first one stay with it."""
    module = cst.parse_module(code)
    found = [node for node in module.body if isinstance(node, cst.BaseStatement)]
    if found and module.header:
        lines = [*module.header, *found[0].leading_lines]  # type: ignore[attr-defined]
        lines = [n if n.comment else n.with_changes(indent=False) for n in lines]
        found[0] = found[0].with_changes(leading_lines=lines)
    return found


def manual_block(codemod: str, reason: str, keep: Iterable[str] = ()) -> list[cst.BaseStatement]:
    """A block that explains what is left to do and raises when it is reached."""
    lines = [f"# maxport MANUAL ({codemod}): {reason}"]
    lines += [f"# was: {line}" for line in keep]
    lines.append(f'raise NotImplementedError("maxport: {codemod}: {reason}")')
    return parse_statements("\n".join(lines) + "\n")
