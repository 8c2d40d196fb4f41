"""What a skeleton takes over from its donor, read from MAX's sources without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from maxport.errors import MaxportError
from maxport.plan.max_source import (
    ARCHITECTURES,
    Found,
    bases,
    class_member,
    is_package,
    names_of,
    resolve,
)
from maxport.plan.native import NativeArch, arch_by_slug


@dataclass(frozen=True)
class Adapter:
    """One entry of `weight_adapters`: the format, and the module and name of the function."""

    format: str
    module: str
    function: str


@dataclass(frozen=True)
class Donor:
    """A donor's registration and the classes it names.

    Attributes:
        arch: What MAX registers.
        module: Module of the `SupportedArchitecture(...)` call.
        keywords: Its keyword arguments, as expressions of that module.
        model: The PipelineModel class.
        config: The configuration class.
        graphs: The top-level module classes that the pipeline model builds.
        adapters: Its weight adapters.
    """

    arch: NativeArch
    module: str
    keywords: dict[str, ast.expr]
    model: Found
    config: Found
    graphs: tuple[Found, ...]
    adapters: tuple[Adapter, ...]

    @property
    def package(self) -> str:
        """The donor's package."""
        return f"{ARCHITECTURES}.{self.arch.slug}"


def read_donor(slug: str) -> Donor:
    """The donor in MAX's architecture folder `slug`.

    Raises:
        MaxportError: No such folder, or its classes cannot be found in the sources.
    """
    arch = arch_by_slug(slug)
    found = resolve(f"{ARCHITECTURES}.{arch.slug}", arch.symbol) or _declared(arch)
    if found is None or not isinstance(found.node, ast.Call):
        raise _unreadable(arch, "its SupportedArchitecture")
    keywords = {k.arg: k.value for k in found.node.keywords if k.arg}
    model = _class(found.module, keywords, "pipeline_model", arch)
    config = _class(found.module, keywords, "config", arch)
    return Donor(
        arch=arch,
        module=found.module,
        keywords=keywords,
        model=model,
        config=config,
        graphs=tuple(_graphs(model)),
        adapters=tuple(_adapters(found.module, keywords.get("weight_adapters"))),
    )


def _declared(arch: NativeArch) -> Found | None:
    return resolve(f"{ARCHITECTURES}.{arch.slug}.arch", arch.symbol)


def _class(module: str, keywords: dict[str, ast.expr], name: str, arch: NativeArch) -> Found:
    node = keywords.get(name)
    found = resolve(module, ast.unparse(node)) if node is not None else None
    if found is None or not isinstance(found.node, ast.ClassDef):
        raise _unreadable(arch, f"its {name}=")
    return found


def _unreadable(arch: NativeArch, what: str) -> MaxportError:
    return MaxportError(
        f"cannot read {what} from the donor {arch.slug}",
        where=f"max/pipelines/architectures/{arch.slug}",
        fix="choose another donor: `maxport list-archs --donors`",
    )


def _adapters(module: str, node: ast.expr | None) -> Iterator[Adapter]:
    if not isinstance(node, ast.Dict):
        return
    for key, value in zip(node.keys, node.values, strict=True):
        found = resolve(module, ast.unparse(value))
        if key is not None and found is not None and isinstance(found.node, ast.FunctionDef):
            yield Adapter(ast.unparse(key), found.module, found.node.name)


def class_name(found: Found) -> str:
    """Name of a found class."""
    assert isinstance(found.node, ast.ClassDef)
    return found.node.name


def methods_of(model: Found) -> dict[str, Found]:
    """The pipeline model's methods that architectures define, the nearest definition of each."""
    methods: dict[str, Found] = {}
    for owner in bases(model):
        if not owner.module.startswith(ARCHITECTURES) or not isinstance(owner.node, ast.ClassDef):
            continue
        for node in owner.node.body:
            if isinstance(node, ast.FunctionDef):
                methods.setdefault(node.name, Found(owner.module, node))
    return methods


def _graphs(model: Found) -> Iterator[Found]:
    """Module classes that the pipeline model's methods construct."""
    seen = set()
    for method in methods_of(model).values():
        for call in ast.walk(method.node):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            made = resolve(method.module, call.func.id)
            if made is None or not isinstance(made.node, ast.ClassDef) or not is_layer(made):
                continue
            if (made.module, made.node.name) not in seen:
                seen.add((made.module, made.node.name))
                yield made


def is_layer(found: Found) -> bool:
    """Whether a class of an architecture is a module, in either lane."""
    layers = ("max.nn", "max.experimental.nn")
    return found.module.startswith(ARCHITECTURES) and any(
        base.module.startswith(layers) and class_name(base) in ("Module", "Layer")
        for base in bases(found)
    )


def overridden(donor: Donor) -> list[Found]:
    """Methods whose statements name the graph or config class; a skeleton repeats them."""
    names = {class_name(found) for found in (*donor.graphs, donor.config)}
    return [found for found in methods_of(donor.model).values() if _used(found.node) & names]


def _used(node: ast.AST) -> set[str]:
    """Names that a function's statements use, without those of its signature."""
    body = node.body if isinstance(node, ast.FunctionDef) else []
    return {n.id for part in body for n in ast.walk(part) if isinstance(n, ast.Name)}


def class_attributes(donor: Donor) -> list[str]:
    """Class-level names of the pipeline model that hold the config class."""
    names = []
    for name in ("model_config_cls", "config_class"):
        member = class_member(donor.model, name)
        if member is not None and isinstance(member.node, ast.Name):
            names.append(name)
    return names


def imports_for(module: str, node: ast.AST, without: set[str]) -> Iterator[str]:
    """Absolute import statements for the module-level names that a piece of its code uses."""
    bound = names_of(module)
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for name in sorted(used - without):
        if name in bound:
            yield _import(module, name, bound[name])


def _import(module: str, name: str, node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
        return f"import {alias.name} as {alias.asname}" if alias.asname else f"import {alias.name}"
    if isinstance(node, ast.ImportFrom):
        alias = next(a for a in node.names if (a.asname or a.name) == name)
        place = absolute(module, node)
        rename = f" as {alias.asname}" if alias.asname else ""
        return f"from {place} import {alias.name}{rename}"
    return f"from {module} import {name}"


def absolute(module: str, node: ast.ImportFrom) -> str:
    """The absolute module of an import in `module`."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if is_package(module) else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])
