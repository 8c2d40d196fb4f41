"""Which generation of MAX's model API a piece of code uses: V2, V3, mixed or neither.

Imports alone mislead: granite, olmo, phi3 and qwen2 hold no V2 layer code of their own and yet are
V2, through their base classes; V3 code keeps `max.nn.kv_cache` and `max.graph.TensorType`.
So each class is judged by its base classes, followed through imports into the installed MAX, and by
the graph values it handles; each file by its classes and what it calls; the whole by its pipeline
model. Reads source text only: neither `max` nor `torch` is imported.
"""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from maxport.migrate.sources import Definition, ModuleSource, Sources, dotted_name
from maxport.migrate.target import Target

Lane = Literal["v2", "v3", "mixed", "neither"]

# The classes in which each generation is rooted. They are MAX's own API, not model names.
_ROOTS: dict[str, Lane] = {
    "max.nn.layer.layer.Module": "v2",
    "max.nn.layer.layer.Layer": "v2",
    "max.nn.layer.Module": "v2",
    "max.nn.layer.Layer": "v2",
    "max.experimental.nn.module.Module": "v3",
    "max.nn.module_v3.module.Module": "v3",
}
_PIPELINES = "max.pipelines.lib"
_VALUES = {"TensorValue", "BufferValue", "TensorValueLike"}


@dataclass(frozen=True)
class ClassLane:
    """One class: its generation, where it stands, and the base class that decides it."""

    name: str
    line: int
    lane: Lane
    why: str
    role: Literal["layer", "pipeline", "other"] = "other"


@dataclass(frozen=True)
class FileLane:
    """One file: its generation, its classes, and the evidence as (line, text)."""

    path: str
    lane: Lane
    classes: tuple[ClassLane, ...]
    evidence: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Classification:
    """The verdict for a target, its files, and the architectures its bases were followed into."""

    name: str
    lane: Lane
    why: str
    files: tuple[FileLane, ...]
    follows: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


@dataclass
class BaseWalk:
    """Base classes followed so far; one per classification.

    `builds` holds what decides a pipeline model's lane where its base class does not.
    """

    sources: Sources
    memo: dict[Definition, tuple[Lane, str, str]] = field(default_factory=dict)
    followed: set[str] = field(default_factory=set)
    builds: dict[Definition, tuple[Lane, str]] = field(default_factory=dict)

    def lane_of(self, definition: Definition) -> tuple[Lane, str, str]:
        """(lane, deciding root, role) of a class; neither when it has no MAX root."""
        if definition in self.memo:
            return self.memo[definition]
        self.memo[definition] = ("neither", "", "other")  # a circle of bases ends here
        self.memo[definition] = self._look(definition)
        return self.memo[definition]

    def _look(self, definition: Definition) -> tuple[Lane, str, str]:
        if definition.dotted in _ROOTS:
            return _ROOTS[definition.dotted], definition.dotted, "layer"
        source = self.sources.module(definition.module)
        node = source.classes.get(definition.name) if source else None
        if source is None or node is None:
            return "neither", "", "other"
        self._note(definition.module)
        if definition.module.startswith(_PIPELINES) and "PipelineModel" in definition.name:
            lane: Lane = "v3" if definition.name.startswith("ModuleV3") else "v2"
            return lane, definition.dotted, "pipeline"
        bases = bases_of(self.sources, source, node)
        found = [self.lane_of(base) for base in bases]
        # A mixin named first must not hide the base that decides.
        decided = [entry for entry in found if entry[0] != "neither"]
        v3 = [entry for entry in decided if entry[0] == "v3"]
        chosen = (v3 or decided or [("neither", "", "other")])[0]
        if chosen[2] == "pipeline" and not chosen[1].rpartition(".")[2].startswith("ModuleV3"):
            # Before 26.3 both generations had one pipeline base: what a model builds decides.
            inherited = next((self.builds[b] for b in bases if b in self.builds), None)
            built = self._built(source, node) or inherited
            if built:
                self.builds[definition] = built
                return built[0], chosen[1], "pipeline"
        return chosen

    def _built(self, source: ModuleSource, node: ast.ClassDef) -> tuple[Lane, str] | None:
        """(lane, dotted name) of the first layer that a pipeline model constructs."""
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                found = self.sources.resolve(source.name, call.func.id)
                lane, _, role = self.lane_of(found)
                if role == "layer" and lane != "neither":
                    return lane, found.dotted
        return None

    def why(self, definition: Definition) -> str:
        """What decides a class's lane, as a phrase."""
        root = self.lane_of(definition)[1]
        if definition in self.builds:
            return f"builds {self.builds[definition][1]}"
        return f"derives from {root}" if root else "no MAX base class"

    def _note(self, module: str) -> None:
        marker = ".architectures."
        if marker in module:
            self.followed.add(module.split(marker, 1)[1].split(".")[0])


def bases_of(sources: Sources, source: ModuleSource, node: ast.ClassDef) -> list[Definition]:
    """Definitions of a class's bases, in order; expressions that are no names are left out."""
    names = (dotted_name(base) for base in node.bases)
    return [sources.resolve(source.name, name) for name in names if name]


def classify(target: Target) -> Classification:
    """Judge every class and file of a target, and the target as a whole.

    Args:
        target: From `open_target`.

    Raises:
        MaxportError: a file cannot be read or is not valid Python.
    """
    walk = BaseWalk(target.sources)
    files = []
    for path in target.files:
        name = target.module_name(path)
        source = target.sources.module(name)
        if source is None or source.path.resolve() != path:
            source = target.sources.load(name, path)
        files.append(_classify_file(walk, source, path.relative_to(target.folder)))
    lane, why = _whole(walk, target, files)
    follows = tuple(sorted(walk.followed - {target.name}))
    return Classification(target.name, lane, why, tuple(files), follows)


def _classify_file(walk: BaseWalk, source: ModuleSource, shown: Path) -> FileLane:
    classes = tuple(_classify_class(walk, source, node) for node in source.classes.values())
    evidence = _evidence(walk, source)
    lanes = {lane for _, lane, _ in evidence} | {
        c.lane for c in classes if c.role == "layer" and c.lane != "neither"
    }
    lane: Lane = "neither"
    if lanes >= {"v2", "v3"} or "mixed" in lanes:
        lane = "mixed"
    elif lanes:
        lane = "v2" if "v2" in lanes else "v3"
    elif pipelines := {c.lane for c in classes if c.role == "pipeline"}:
        lane = "mixed" if len(pipelines) > 1 else next(iter(pipelines))
    return FileLane(str(shown), lane, classes, tuple((line, text) for line, _, text in evidence))


def _classify_class(walk: BaseWalk, source: ModuleSource, node: ast.ClassDef) -> ClassLane:
    lane, _, role = walk.lane_of(Definition(source.name, node.name))
    why = walk.why(Definition(source.name, node.name))
    uses_values = any(isinstance(n, ast.Name) and n.id in _VALUES for n in ast.walk(node))
    if lane == "v3" and role == "layer" and uses_values:
        lane, why = "mixed", f"{why}, yet handles TensorValue"
    elif lane == "neither" and uses_values:
        lane, why = "v2", "handles TensorValue"
    return ClassLane(node.name, node.lineno, lane, why, role)  # type: ignore[arg-type]


def _evidence(walk: BaseWalk, source: ModuleSource) -> list[tuple[int, Lane, str]]:
    """(line, lane, text) of what a file imports and uses beyond its class statements."""
    found: list[tuple[int, Lane, str]] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [alias.name for alias in node.names]
            if module.startswith("max.experimental") and not module.startswith(
                "max.experimental.cascade"
            ):
                found.append((node.lineno, "v3", f"from {module} import {', '.join(names)}"))
            elif module == "max.graph":
                hits = [n for n in names if n in {"Graph", *_VALUES, "ops"}]
                if hits:
                    found.append((node.lineno, "v2", f"from max.graph import {', '.join(hits)}"))
            elif module.startswith("max.nn"):
                hits = [n for n in names if _is_v2_layer(walk, module, n)]
                if hits:
                    found.append((node.lineno, "v2", f"from {module} import {', '.join(hits)}"))
    return sorted(found)


def _is_v2_layer(walk: BaseWalk, module: str, name: str) -> bool:
    """True when `name` is a layer or works on graph values; settings (KVCacheParams) are not."""
    if module == "max.nn.kernels":
        return True
    definition = walk.sources.resolve(module, name)
    if walk.lane_of(definition)[0] == "v2":
        return True
    source = walk.sources.module(definition.module)
    function = source.functions.get(definition.name) if source else None
    return function is not None and any(
        isinstance(n, ast.Name) and n.id in _VALUES for n in ast.walk(function.args)
    )


def _whole(walk: BaseWalk, target: Target, files: list[FileLane]) -> tuple[Lane, str]:
    layers = [c for f in files for c in f.classes if c.role == "layer"]
    pipelines = [c for f in files for c in f.classes if c.role == "pipeline"]
    count = {lane: sum(c.lane == lane for c in layers) for lane in ("v2", "v3", "mixed")}
    modern = [c for c in pipelines if c.lane == "v3"]
    if modern:
        return "v3", f"pipeline model {modern[0].name} {modern[0].why}"
    registered = _registered(walk, target)
    if registered and registered[0] == "v2" and count["v2"] <= count["v3"] + count["mixed"]:
        return registered  # it holds a V3 model too, such as a text encoder
    if layers:
        v3 = count["v3"] + count["mixed"]
        lane: Lane = "v2" if count["v2"] > v3 else "v3"
        return lane, f"{count['v2']} layer classes are V2, {v3} are V3"
    if pipelines:
        return pipelines[0].lane, f"pipeline model {pipelines[0].name} {pipelines[0].why}"
    if registered:
        return registered
    number = {lane: sum(f.lane == lane for f in files) for lane in ("v2", "v3", "mixed")}
    if not any(number.values()):
        return "neither", "no MAX model code"
    if number["v2"] == number["v3"]:
        return "mixed", "its files import both generations"
    ahead: Lane = "v2" if number["v2"] > number["v3"] else "v3"
    counts = ", ".join(f"{count} {lane}" for lane, count in number.items())
    return ahead, f"by what its files import: {counts}"


def _registered(walk: BaseWalk, target: Target) -> tuple[Lane, str] | None:
    """The lane of the `pipeline_model=` an arch.py registers, followed through its imports."""
    for path in target.files:
        source = target.sources.module(target.module_name(path))
        for node in ast.walk(source.tree) if source else ():
            if isinstance(node, ast.keyword) and node.arg == "pipeline_model" and source:
                name = dotted_name(node.value)
                model = target.sources.resolve(source.name, name)
                lane = walk.lane_of(model)[0]
                if name and lane != "neither":
                    return lane, f"registers {name}, which {walk.why(model)}"
    return None
