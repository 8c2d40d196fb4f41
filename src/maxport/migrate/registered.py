"""What a V2 package registers with MAX, read from its `SupportedArchitecture(...)` calls."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from maxport.migrate.kinds import Kinds
from maxport.migrate.sources import Definition, dotted_name
from maxport.migrate.target import Target


@dataclass(frozen=True)
class Registration:
    """One `variable = SupportedArchitecture(name=..., pipeline_model=..., ...)`."""

    variable: str
    name: str
    pipeline: Definition
    batching: str
    module: str
    line: int


def registrations(kinds: Kinds, target: Target) -> list[Registration]:
    """All registrations of a target with a constant name and a nameable pipeline model."""
    found: list[Registration] = []
    for path in target.files:
        source = target.sources.module(target.module_name(path))
        for node in source.tree.body if source else ():
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                continue
            if dotted_name(node.value.func) != "SupportedArchitecture" or source is None:
                continue
            values = {k.arg: k.value for k in node.value.keywords if k.arg}
            name, model = values.get("name"), values.get("pipeline_model")
            if isinstance(name, ast.Constant) and model is not None and dotted_name(model):
                pipeline = kinds.sources.resolve(source.name, dotted_name(model))
                batching = dotted_name(values["batching"]) if "batching" in values else ""
                variable = ast.unparse(node.targets[0])
                found.append(
                    Registration(
                        variable, str(name.value), pipeline, batching, source.name, node.lineno
                    )
                )
    return found
