"""How a V2 pipeline model constructs its graph's root: that call, and what its arguments need.

V2 builds the root wherever it builds the graph, between loading weights and declaring inputs. Only
the statements that lead to the root's arguments belong into V3's `_instantiate_module`; they are
found backwards from the call, by the names they bind or change.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from maxport.migrate.classify import bases_of
from maxport.migrate.kinds import Kinds
from maxport.migrate.sources import ARCHITECTURES, Definition, ModuleSource

# What V3's base class hands to `_instantiate_module`, made by `_create_model_config`.
GIVEN = "model_config"
Chain = list[tuple[ModuleSource, ast.ClassDef]]


@dataclass(frozen=True)
class Construction:
    """The call that constructs the root and the statements before it that it needs."""

    source: ModuleSource
    call: ast.Call
    statements: tuple[ast.stmt, ...]
    parameter: str

    @property
    def text(self) -> str:
        """The statements and the call, as the body of a function of `self` and `model_config`."""
        lines = self.source.text.splitlines()
        parts = [] if self.parameter == GIVEN else [f"{self.parameter} = {GIVEN}"]
        for statement in self.statements:
            first = statement.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            block = lines[first : statement.end_lineno]
            indent = min(len(line) - len(line.lstrip()) for line in block if line.strip())
            parts += [line[indent:] for line in block]
        return "\n".join([*parts, f"return {ast.unparse(self.call)}"])


def pipeline_chain(kinds: Kinds, first: Definition, package: str) -> Chain:
    """The pipeline model and its bases that are architectures' own, nearest first.

    Args:
        kinds: The judge of names.
        first: The registered pipeline model.
        package: The target's own package.
    """
    found: Chain = []
    queue = [first]
    while queue:
        at = queue.pop(0)
        source = kinds.sources.module(at.module)
        node = source.classes.get(at.name) if source else None
        own = at.module.startswith((ARCHITECTURES, package))
        if source is None or node is None or not own:
            continue
        found.append((source, node))
        queue += bases_of(kinds.sources, source, node)
    return found


def find_construction(kinds: Kinds, root: Definition, chain: Chain) -> Construction | None:
    """The nearest call of the root in a pipeline model, with what it needs; None without one."""
    for source, node in chain:
        for function in node.body:
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if (
                    isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Name)
                    and kinds.sources.resolve(source.name, call.func.id) == root
                ):
                    return _construction(source, function, call)
    return None


def _construction(source: ModuleSource, function: ast.FunctionDef, call: ast.Call) -> Construction:
    needed = _read(call)
    kept: list[ast.stmt] = []
    for statement in reversed(_before(function.body, call)):
        changed = _changed(statement)
        if GIVEN in changed and not changed - {GIVEN}:
            needed.discard(GIVEN)  # V3's base class made it already
        elif changed & needed:
            kept.insert(0, statement)
            needed |= _read(statement)
    names = [arg.arg for arg in function.args.args[1:]]
    parameter = names[0] if len(names) == 1 and names[0] in needed else GIVEN
    return Construction(source, call, tuple(kept), parameter)


def _before(body: list[ast.stmt], call: ast.Call) -> list[ast.stmt]:
    """Statements that run before the one that holds `call`, in blocks around it too."""
    found: list[ast.stmt] = []
    for statement in body:
        if not any(node is call for node in ast.walk(statement)):
            found.append(statement)
            continue
        for _, value in ast.iter_fields(statement):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                inner = any(node is call for item in value for node in ast.walk(item))
                return found + (_before(value, call) if inner else [])
        break
    return found


def _read(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _changed(statement: ast.stmt) -> set[str]:
    """Names a statement binds, and objects whose attributes or methods it uses for effect."""
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= _owner(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found |= _owner(node.value.func)
    return found


def _owner(node: ast.expr) -> set[str]:
    while isinstance(node, ast.Attribute):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()
