"""A port made of subclasses of its donor: it runs the donor's graph until its own is written."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from maxport.emit.prose import comment, docstring
from maxport.plan.compare import Delta
from maxport.plan.max_source import max_version
from maxport.scaffold.donor import (
    Donor,
    class_attributes,
    class_name,
    imports_for,
    overridden,
)


@dataclass(frozen=True)
class Target:
    """The port to make: slug, the class config.json names, the name to register, the checkpoint."""

    slug: str
    hf_class: str
    name: str
    model: str

    @property
    def stem(self) -> str:
        """Start of the port's class names."""
        return re.sub(r"For\w+$|Model$", "", self.hf_class) or self.hf_class

    @property
    def config(self) -> str:
        """Name of the configuration class."""
        return f"{self.stem}Config"

    @property
    def pipeline_model(self) -> str:
        """Name of the pipeline model class."""
        return f"{self.stem}PipelineModel"


def render_skeleton(target: Target, donor: Donor, deltas: Sequence[Delta]) -> dict[str, str]:
    """The skeleton's files by name, not yet formatted."""
    return {
        "__init__.py": render_init(target, donor),
        "arch.py": render_arch(target, donor),
        "model_config.py": _config(target, donor),
        "model.py": _model(target, donor),
        "weight_adapters.py": _adapters(target, donor),
        f"{target.slug}.py": _graph(target, donor, deltas),
    }


def graph_names(target: Target, donor: Donor) -> dict[str, str]:
    """The port's name for each of the donor's graph classes."""
    names: dict[str, str] = {}
    for found in donor.graphs:
        old = class_name(found)
        prefix = "Distributed" if old.startswith("Distributed") else ""
        new = f"{prefix}{target.stem}Graph"
        names[old] = new if new not in names.values() else f"{target.stem}{old}"
    return names


def render_init(target: Target, donor: Donor) -> str:
    """`__init__.py` with the ARCHITECTURES that MAX looks for."""
    head = docstring(f"{target.stem} for MAX, scaffolded from {_origin(donor)}.")
    return (
        f"{head}\n\nfrom .arch import {target.slug}_arch\n\n"
        f'ARCHITECTURES = [{target.slug}_arch]\n\n__all__ = ["ARCHITECTURES"]\n'
    )


def _origin(donor: Donor) -> str:
    return f"`{donor.arch.slug}` of MAX {max_version()}"


def render_arch(target: Target, donor: Donor) -> str:
    """`arch.py`: every argument of the donor's registration, with the port's own classes."""
    own = {class_name(donor.config), class_name(donor.model)}
    lines, imports = [], {"from max.pipelines.lib import SupportedArchitecture"}
    replaced = {
        "name": repr(target.name),
        "example_repo_ids": repr([target.model]),
        "pipeline_model": target.pipeline_model,
        "config": target.config,
    }
    if len(donor.adapters) and len(donor.adapters) == _count(donor.keywords):
        pairs = ", ".join(f"{a.format}: {a.function}" for a in donor.adapters)
        replaced["weight_adapters"] = f"{{{pairs}}}"
        imports.add("from max.graph.weights import WeightsFormat")
        names = ", ".join(sorted({a.function for a in donor.adapters}))
        imports.add(f"from .weight_adapters import {names}")
    for key, value in donor.keywords.items():
        if key in replaced:
            lines.append(f"{key}={replaced[key]},")
            continue
        text = re.sub(rf"\b{class_name(donor.config)}\b", target.config, ast.unparse(value))
        lines.append(f"{key}={text},")
        imports |= set(imports_for(donor.module, value, own))
    if "memory_planner" not in donor.keywords:
        lines.append(
            comment(
                "TODO: the donor declares no memory_planner. A port with a KV cache needs "
                "memory_planner=PagedMemoryPlanner; leave it out only if it plans its own memory."
            ).rstrip()
        )
    imports |= {
        f"from .model import {target.pipeline_model}",
        f"from .model_config import {target.config}",
    }
    head = docstring(
        f"Registration of `{target.name}`; all arguments but names and classes are those of "
        f"{_origin(donor)}."
    )
    body = textwrap.indent("\n".join(lines), "    ")
    block = "\n".join(sorted(imports))
    return f"{head}\n\n{block}\n\n{target.slug}_arch = SupportedArchitecture(\n{body}\n)\n"


def _count(keywords: dict[str, ast.expr]) -> int:
    node = keywords.get("weight_adapters")
    return len(node.keys) if isinstance(node, ast.Dict) else 0


def _config(target: Target, donor: Donor) -> str:
    base = class_name(donor.config)
    alias = f"Donor{base}"
    head = docstring(f"Configuration of {target.stem}: so far what {_origin(donor)} reads.")
    doc = docstring(
        f"TODO: read what `{target.hf_class}` needs in initialize(); see `maxport inspect`.",
        indent=4,
    )
    return (
        f"{head}\n\nfrom __future__ import annotations\n\nfrom dataclasses import dataclass\n\n"
        f"from {donor.config.module} import {base} as {alias}\n\n\n"
        f"@dataclass(kw_only=True)\nclass {target.config}({alias}):\n    {doc}\n"
    )


def _model(target: Target, donor: Donor) -> str:
    base = class_name(donor.model)
    alias = f"Donor{base}"
    graphs = graph_names(target, donor)
    names = {**graphs, class_name(donor.config): target.config}
    imports = {f"from {donor.model.module} import {base} as {alias}"}
    imports.add(f"from .model_config import {target.config}")
    methods, notes = [], []
    for method in overridden(donor):
        assert isinstance(method.node, ast.FunctionDef)
        source = ast.unparse(method.node)
        if "super()" in source:
            notes.append(
                f"# TODO: {method.node.name} of the donor calls super(): override it here."
            )
            continue
        for old, new in names.items():
            source = re.sub(rf"\b{old}\b", new, source)
        methods.append(textwrap.indent(source, "    "))
        imports |= set(imports_for(method.module, method.node, set(names)))
    used = [new for new in sorted(graphs.values()) if _in(new, methods)]
    if used:
        imports.add(f"from .{target.slug} import {', '.join(used)}")
    head = docstring(
        f"Pipeline model of {target.stem}: {_origin(donor)} on the port's own classes."
    )
    doc = docstring(f"Loads {target.stem} as the donor loads its own model.", indent=4)
    attributes = "".join(f"    {name} = {target.config}\n" for name in class_attributes(donor))
    body = "\n\n".join(methods)
    todo = textwrap.indent("\n".join(notes), "    ")
    return (
        f"{head}\n\nfrom __future__ import annotations\n\n{_block(imports)}\n\n\n"
        f"class {target.pipeline_model}({alias}):\n    {doc}\n\n{attributes}\n{todo}\n\n{body}\n"
    )


def _in(name: str, texts: Iterable[str]) -> bool:
    return any(re.search(rf"\b{name}\b", text) for text in texts)


def _block(imports: Iterable[str]) -> str:
    return "\n".join(sorted(imports))


def _adapters(target: Target, donor: Donor) -> str:
    head = docstring(f"Weight adapters of {target.stem}: so far those of {_origin(donor)}.")
    imports, functions = [], []
    for adapter in {a.function: a for a in donor.adapters}.values():
        alias = f"donor_{adapter.function}"
        imports.append(f"from {adapter.module} import {adapter.function} as {alias}")
        functions.append(
            f"def {adapter.function}(state_dict: dict[str, Any], **given: Any) -> dict[str, Any]:\n"
            f'    """Weights by the donor\'s parameter names.\n\n'
            f"    TODO: map the checkpoint's names; `maxport list-keys` shows them.\n"
            f'    """\n    return {alias}(state_dict, **given)\n'
        )
    if not functions:
        return f"{head}\n"
    block = "\n".join(["from typing import Any", "", *imports])
    return f"{head}\n\nfrom __future__ import annotations\n\n{block}\n\n\n" + "\n\n".join(functions)


def todo_list(deltas: Sequence[Delta]) -> str:
    """One numbered comment for each difference from the donor."""
    lines = []
    for number, delta in enumerate(deltas, 1):
        place = f" ({delta.reference})" if delta.reference else ""
        text = (
            f"TODO {number}, {delta.component}{place}: the model does {delta.model}; the donor "
            f"does {delta.donor}. {delta.change}"
        )
        lines.append(comment(text))
    return "".join(lines)


def _graph(target: Target, donor: Donor, deltas: Sequence[Delta]) -> str:
    head = docstring(
        f"Graph of {target.stem}: NOT YET WRITTEN. It computes what {_origin(donor)} computes, "
        f"until each TODO below is done as `{target.hf_class}` does it."
    )
    imports, classes, names = [], [], graph_names(target, donor)
    for found in donor.graphs:
        base = class_name(found)
        imports.append(f"from {found.module} import {base} as Donor{base}")
        doc = docstring(f"TODO: the donor's {base}, unchanged.", indent=4)
        classes.append(f"class {names[base]}(Donor{base}):\n    {doc}\n")
    todos = todo_list(deltas) or "# TODO: write the graph; `maxport plan` lists the differences.\n"
    block = "\n".join(sorted(imports))
    return f"{head}\n\n{block}\n\n{todos}\n\n" + "\n\n".join(classes)
