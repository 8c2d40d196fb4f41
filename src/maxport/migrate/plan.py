"""What the V3 package will hold: the graph's root, its own files, the files carried over."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from maxport.errors import MaxportError
from maxport.migrate.classify import bases_of
from maxport.migrate.closure import Closure, close, uses
from maxport.migrate.construction import Construction, find_construction, pipeline_chain
from maxport.migrate.kinds import Kinds
from maxport.migrate.parallel import (
    parallel_root,
    several_devices,
    signals_removable,
    weight_attributes,
)
from maxport.migrate.registered import registrations
from maxport.migrate.sources import ARCHITECTURES, Definition, ModuleSource
from maxport.migrate.target import Target

ENTRY = ("trace", "input_tree", "input_types")
# What marks code for several devices; such a root is taken only when there is no other.
_SEVERAL = frozenset({"signal_buffers", "Signals", "Allreduce", "data_parallel_splits"})


@dataclass
class Plan:
    """Everything decided before the first rewrite.

    Attributes:
        target: The V2 code.
        kinds: The judge of names.
        root: The class whose `trace` or `__call__` is the graph.
        closure: What is carried over, replaced, bridged.
        places: V2 module -> path parts inside the V3 package.
        graph: modules with graph code, own and carried; other own files are settings.
        dropped: own modules left out, with the reason.
        extras: helper modules the rewritten code asks for.
        construction: how the pipeline model constructs the root; None without a registration.
        parallel: whether V2 runs on several devices, and the package therefore does.
        several: the root V2 builds for several devices, where that is another class.
        several_construction: how the pipeline model constructs that one.
        weights: attributes that hold weights; known where `parallel`.
        signals: whether V2's signal buffers can be left out everywhere.
    """

    target: Target
    kinds: Kinds
    root: Definition
    closure: Closure
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    graph: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    extras: set[str] = field(default_factory=set)
    construction: Construction | None = None
    parallel: bool = False
    several: Definition | None = None
    several_construction: Construction | None = None
    weights: frozenset[str] = frozenset()
    signals: bool = False

    @property
    def name(self) -> str:
        """Name of the V3 package."""
        return f"{self.target.name}_modulev3"

    def relative(self, module: str, other: str) -> str:
        """How `module`'s file in the V3 package imports `other`'s: a relative module name."""
        here, there = list(self.folder_of(module)), list(self.places[other])
        while here and there[:-1] and here[0] == there[0]:
            here, there = here[1:], there[1:]
        return "." * (len(here) + 1) + ".".join(there)

    def folder_of(self, module: str) -> tuple[str, ...]:
        """Folder of `module`'s file inside the V3 package, as path parts."""
        place = self.places[module]
        source = self.kinds.sources.module(module)
        own = module not in self.closure.carried
        return place if own and source is not None and source.is_package else place[:-1]

    def relative_from_top(self, module: str) -> str:
        """How a file at the top of the V3 package imports `module`'s file."""
        return "." + ".".join(self.places[module])

    def place_for_top(self, module: str) -> str:
        """Where a file at the top of the V3 package imports `module`'s kept names from."""
        inside = module == self.target.package or module.startswith(self.target.package + ".")
        if not inside:
            return module
        return "." + module.removeprefix(self.target.package).strip(".")


def make_plan(target: Target) -> Plan:
    """Find the graph's root and what it needs.

    Raises:
        MaxportError: the code defines no V2 graph.
    """
    kinds = Kinds(target.sources)
    for path in target.files:
        name = target.module_name(path)
        source = target.sources.module(name)
        if source is None or source.path.resolve() != path:
            target.sources.load(name, path)
    root = find_root(kinds, target)
    parallel = several_devices(kinds, target)
    several = None
    if parallel:
        kinds.dropped = frozenset()
        several = parallel_root(kinds, root, _built_by_pipelines(kinds, target))
    roots = [root, several] if several else [root]
    made, *others = (_constructed(kinds, target, found) for found in roots)
    extra = [
        (found.source, node)
        for found in (made, *others)
        if found
        for node in (*found.statements, found.call)
    ]
    own, dropped = _own_modules(kinds, target, root, extra)
    wanted: dict[str, set[str] | None] = {module: None for module in own}
    donors = [found for found in roots if found.module not in wanted]
    for found in donors:
        wanted[found.module] = (wanted.get(found.module) or set()) | {found.name}
    closure = close(kinds, wanted, extra)
    for found in donors:
        closure.carried.setdefault(found.module, set()).add(found.name)
    plan = Plan(target, kinds, root, closure, dropped=dropped, construction=made)
    plan.parallel, plan.several = parallel, several
    plan.several_construction = others[0] if others else None
    for path in target.files:
        module = target.module_name(path)
        if module in own:
            plan.graph.append(module)
        if module not in dropped:
            parts = module.removeprefix(target.package).strip(".").split(".")
            plan.places[module] = tuple(part for part in parts if part)
    for module in closure.carried:
        plan.graph.append(module)
        plan.places[module] = ("carried", _carried_name(module, plan.places))
    if parallel:
        plan.weights = weight_attributes(kinds, plan.graph)
        plan.signals = signals_removable(kinds, plan.graph, closure.carried)
    return plan


def _constructed(kinds: Kinds, target: Target, root: Definition) -> Construction | None:
    """How the first registered pipeline model constructs the root."""
    found = registrations(kinds, target)
    if not found:
        return None
    return find_construction(kinds, root, pipeline_chain(kinds, found[0].pipeline, target.package))


def _carried_name(module: str, taken: dict[str, tuple[str, ...]]) -> str:
    parts = module.split(".")
    name = parts[-1]
    if module.startswith(ARCHITECTURES):
        architecture = module.removeprefix(ARCHITECTURES).strip(".").split(".")[0]
        name = name if name == architecture else f"{architecture}_{name}"
    used = {place[-1] for place in taken.values() if place[:1] == ("carried",)}
    return name if name not in used else "_".join(parts[-2:])


def find_root(kinds: Kinds, target: Target) -> Definition:
    """The class that is the graph: own if there is one, else the donor's.

    Raises:
        MaxportError: neither the code nor what its pipeline model derives from defines a V2 graph.
    """
    own = [target.module_name(path) for path in target.files]
    candidates = _candidates(kinds, own)
    if not candidates:
        for module in _donor_modules(kinds, target):
            candidates += _candidates(kinds, [module])
    built = _built_by_pipelines(kinds, target)
    if not candidates:  # graphs made by `with Graph(...)` in the pipeline model
        found = [d for d in built if kinds.of(d) == "layer"]
        layers = sorted(found, key=lambda d: _distance(kinds, target, d))
        candidates = [((0, 0, i), definition) for i, definition in enumerate(layers)]
    if not candidates:  # a component or a single file: the last layer defined holds the others
        layers = [Definition(module, name) for module in own for name in _layers_of(kinds, module)]
        candidates = [((0, 0, -i), definition) for i, definition in enumerate(layers)]
    if not candidates:
        raise MaxportError(
            "no V2 model graph found here",
            where=str(target.path),
            fix="give the folder that holds the V2 model, or run `maxport classify` on it first",
        )
    chosen = [item for item in candidates if item[1] in built] or candidates
    return min(chosen, key=lambda item: item[0])[1]


def _distance(kinds: Kinds, target: Target, found: Definition) -> tuple[bool, bool, int, str]:
    """Sorts own classes first, then architectures', later definitions before earlier ones."""
    source = kinds.sources.module(found.module)
    node = source.classes.get(found.name) if source else None
    own = found.module.startswith(target.package)
    architecture = found.module.startswith(ARCHITECTURES)
    return not own, not architecture, -(node.lineno if node else 0), found.dotted


def _layers_of(kinds: Kinds, module: str) -> list[str]:
    source = kinds.sources.module(module)
    names = list(source.classes) if source else []
    return [n for n in names if kinds.walk.lane_of(Definition(module, n))[::2] == ("v2", "layer")]


def _built_by_pipelines(kinds: Kinds, target: Target) -> set[Definition]:
    """Classes that the target's pipeline models, own or registered, and their bases construct."""
    queue = [found.pipeline for found in registrations(kinds, target)]
    for path in target.files:
        source = kinds.sources.module(target.module_name(path))
        for name in source.classes if source else ():
            definition = Definition(target.module_name(path), name)
            if kinds.walk.lane_of(definition)[2] == "pipeline":
                queue.append(definition)
    built: set[Definition] = set()
    seen: set[Definition] = set()
    while queue:
        at = queue.pop()
        source = kinds.sources.module(at.module)
        node = source.classes.get(at.name) if source else None
        if (
            at in seen
            or source is None
            or node is None
            or at.module.startswith("max.pipelines.lib")
        ):
            continue
        seen.add(at)
        queue += bases_of(kinds.sources, source, node)
        for item in ast.walk(node):
            if isinstance(item, ast.Call) and isinstance(item.func, ast.Name):
                built.add(kinds.sources.resolve(source.name, item.func.id))
    return built


def _candidates(kinds: Kinds, modules: list[str]) -> list[tuple[tuple[int, int, int], Definition]]:
    found = []
    for order, module in enumerate(modules):
        source = kinds.sources.module(module)
        for node in source.classes.values() if source else ():
            methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            entry = [i for i, name in enumerate(ENTRY) if name in methods]
            definition = Definition(module, node.name)
            lane, _, role = kinds.walk.lane_of(definition)
            if entry and (lane, role) == ("v2", "layer"):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                names |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
                several = len(names & _SEVERAL)
                found.append(((several, entry[0], order), definition))
    return found


def _donor_modules(kinds: Kinds, target: Target) -> list[str]:
    """Modules of the architectures that the target's classes and registration lead to."""
    found: list[str] = []
    for path in target.files:
        source = target.sources.module(target.module_name(path))
        for definition in source.imports.values() if source else ():
            resolved = kinds.sources.resolve(definition.module, definition.name)
            if not resolved.module.startswith(ARCHITECTURES):
                continue
            architecture = resolved.module.removeprefix(ARCHITECTURES).strip(".").split(".")[0]
            package = f"{ARCHITECTURES}.{architecture}"
            init = kinds.sources.file_of(package)
            for file in sorted(init.parent.rglob("*.py")) if init else ():
                parts = file.relative_to(init.parent).with_suffix("").parts  # type: ignore[union-attr]
                module = ".".join([package, *[p for p in parts if p != "__init__"]])
                if module not in found:
                    found.append(module)
    return found


def _own_modules(
    kinds: Kinds,
    target: Target,
    root: Definition,
    extra: Sequence[tuple[ModuleSource, ast.AST]],
) -> tuple[list[str], dict[str, str]]:
    """Own modules with graph code that the root or its construction reaches, and the others."""
    own = {target.module_name(path) for path in target.files}
    graph = {module for module in own if _has_graph_code(kinds, target.sources.module(module))}
    reached: list[str] = []
    queue = [root.module]
    for user, node in extra:
        read = uses(user, node, kinds.dropped)
        named = (kinds.sources.resolve(user.name, name) for name, _ in read)
        queue += [at.module for at in named if at.module in own and kinds.of(at) == "layer"]
    while queue:
        module = queue.pop()
        source = kinds.sources.module(module)
        if module in reached or source is None:
            continue
        if module in own:
            reached.append(module)
        for node in source.tree.body:
            for name, _ in uses(source, node, kinds.dropped):
                found = kinds.sources.resolve(source.name, name)
                if found.module in own and kinds.of(found) == "layer":
                    queue.append(found.module)
    dropped = {m: "no graph that is built here uses it" for m in graph - set(reached)}
    return sorted(reached), dropped


def _has_graph_code(kinds: Kinds, source: ModuleSource | None) -> bool:
    names = [*source.classes, *source.functions] if source else []
    return source is not None and any(
        kinds.of(Definition(source.name, name)) in ("layer", "bridge") for name in names
    )
