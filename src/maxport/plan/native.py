"""The architectures the installed MAX registers, read from its sources without importing it.

MAX lists them in `register_all_models` as `_LazyArch(name, module, symbol)`; each symbol is a
`SupportedArchitecture(...)` call whose keyword arguments say what it supports.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from maxport.checkpoint.cache import cache_root, write_whole
from maxport.errors import MaxportError
from maxport.plan.max_source import (
    ARCHITECTURES,
    Found,
    bases,
    literal,
    max_version,
    resolve,
    tree_of,
)

SUFFIX = "_ModuleV3"


@dataclass(frozen=True)
class NativeArch:
    """One registered architecture.

    Attributes:
        name: The key MAX looks up: a class name from config.json, with `_ModuleV3` where both
            lanes exist.
        slug: Folder below max/pipelines/architectures.
        symbol: The variable in that package that holds the SupportedArchitecture.
        lane: "v3" if the pipeline model is a ModuleV3 one, else "v2".
        task: Pipeline task, lower case ("text_generation").
        encodings: Weight encodings it accepts; the default first. Empty for a speculator, which
            MAX derives from its target.
        multi_gpu: Whether it runs on more than one GPU.
        memory_planner: Class that budgets memory, or None.
        tokenizer: Tokenizer class.
        config_class, model_class: Names of its config and pipeline model classes.
        examples: Hub ids MAX names as examples.
        required_arguments: Arguments MAX sets for it.
        speculates_on: For a speculator, the target's name.
        donor: Whether a port of a decoder can start from it: text generation with a pipeline
            model and a memory planner, no speculator.
    """

    name: str
    slug: str
    symbol: str
    lane: str
    task: str
    encodings: tuple[str, ...]
    multi_gpu: bool
    memory_planner: str | None
    tokenizer: str | None
    config_class: str | None
    model_class: str | None
    examples: tuple[str, ...]
    required_arguments: dict[str, object]
    speculates_on: str | None
    donor: bool

    @property
    def class_name(self) -> str:
        """The class name of config.json that this architecture serves."""
        return self.name.removesuffix(SUFFIX)


@cache
def native_archs() -> tuple[NativeArch, ...]:
    """All registered architectures in MAX's order; scanned once per MAX version, then cached.

    Raises:
        MaxportError: MAX is not installed, or its table is not where it is expected.
    """
    if kept := _kept():
        return kept
    found = tuple(_scan(*entry) for entry in _table())
    rows = [asdict(arch) for arch in found]
    write_whole(scan_cache("architectures"), json.dumps(rows, indent=1))
    return found


def serving(class_name: str) -> tuple[NativeArch, ...]:
    """The architectures that answer for `architectures[0] == class_name`, V2 before V3."""
    names = {class_name, class_name + SUFFIX}
    found = [a for a in _some(lambda name, _: name in names) if not a.speculates_on]
    return tuple(sorted(found, key=lambda arch: (arch.lane, arch.name)))


def archs_in(slug: str) -> tuple[NativeArch, ...]:
    """The architectures that the folder `slug` defines."""
    return _some(lambda _, module: module.strip(".").split(".")[0] == slug)


def arch_by_slug(slug: str) -> NativeArch:
    """The architecture in the folder `slug`; the text-generation one where it defines several.

    Raises:
        MaxportError: MAX has no such folder; names the closest ones.
    """
    found = archs_in(slug)
    if not found:
        import difflib

        slugs = sorted({module.strip(".").split(".")[0] for _, module, _, _ in _table()})
        close = difflib.get_close_matches(slug, slugs, 3) or slugs[:3]
        raise MaxportError(
            f"MAX {max_version()} has no architecture folder {slug!r}",
            fix=f"did you mean {', '.join(close)}? `maxport list-archs` lists all",
        )
    return next((arch for arch in found if arch.donor), found[0])


def _some(wanted: Callable[[str, str], bool]) -> tuple[NativeArch, ...]:
    """Architectures by (name, module); scans only these unless all were scanned before."""
    entries = [entry for entry in _table() if wanted(entry[0], entry[1])]
    if kept := _kept():
        pairs = {(entry[0], entry[1].strip(".").split(".")[0]) for entry in entries}
        return tuple(arch for arch in kept if (arch.name, arch.slug) in pairs)
    return tuple(_scan(*entry) for entry in entries)


@cache
def _kept() -> tuple[NativeArch, ...]:
    """The scan kept by an earlier run; empty if there is none."""
    try:
        rows = json.loads(scan_cache("architectures").read_text("utf-8"))
        return tuple(_from_json(row) for row in rows)
    except (OSError, ValueError, TypeError, KeyError):
        return ()


def scan_cache(name: str) -> Path:
    """Cache file for a scan of MAX's sources: one per MAX version and version of the scanner."""
    digest = hashlib.sha256()
    for file in ("max_source.py", "native.py", "config_reads.py"):
        digest.update(Path(__file__).with_name(file).read_bytes())
    return cache_root() / "max" / f"{max_version()}-{digest.hexdigest()[:8]}" / f"{name}.json"


def _from_json(row: dict[str, object]) -> NativeArch:
    row = dict(row)
    for key in ("encodings", "examples"):
        row[key] = tuple(row[key])  # type: ignore[arg-type]
    return NativeArch(**row)  # type: ignore[arg-type]


@cache
def _table() -> tuple[tuple[str, str, str, str | None], ...]:
    """(name, module, symbol, speculates_on) of every `_LazyArch(...)`."""
    tree = tree_of(ARCHITECTURES)
    calls = [
        node
        for node in ast.walk(tree or ast.Module([], []))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "_LazyArch"
    ]
    if not calls:
        raise MaxportError(
            "MAX's table of architectures is not where this version of maxport expects it",
            where=ARCHITECTURES,
            fix="install the MAX version that maxport pins",
        )
    return tuple(_entry(call) for call in calls)


def _entry(call: ast.Call) -> tuple[str, str, str, str | None]:
    fields = dict(zip(("name", "module", "symbol", "speculates_on"), call.args, strict=False))
    fields |= {keyword.arg or "": keyword.value for keyword in call.keywords}
    value = {key: ast.literal_eval(node) for key, node in fields.items()}
    return value["name"], value["module"], value["symbol"], value.get("speculates_on")


@cache
def _scan(name: str, module: str, symbol: str, speculates_on: str | None) -> NativeArch:
    package = ARCHITECTURES + module
    found = resolve(package, symbol)
    given = _keywords(found)
    config = _class(found, given.get("config"))
    model = _class(found, given.get("pipeline_model"))
    planner = _name(given.get("memory_planner"))
    task = (_name(given.get("task")) or "").rsplit(".", 1)[-1].lower()
    return NativeArch(
        name=name,
        slug=module.strip(".").split(".")[0],
        symbol=symbol,
        lane="v3" if name.endswith(SUFFIX) or _is_v3(model) else "v2",
        task=task,
        encodings=_encodings(found, given),
        multi_gpu=_value(found, given.get("multi_gpu_supported")) is True,
        memory_planner=planner,
        tokenizer=_name(given.get("tokenizer")),
        config_class=_class_name(config),
        model_class=_class_name(model),
        examples=_strings(_value(found, given.get("example_repo_ids"))),
        required_arguments=_arguments(_value(found, given.get("required_arguments"))),
        speculates_on=speculates_on,
        donor=task == "text_generation" and bool(planner and model) and not speculates_on,
    )


def _keywords(found: Found | None) -> dict[str, ast.expr]:
    """Keyword arguments of the SupportedArchitecture; `dataclasses.replace(base, ...)` included."""
    call = found.node if found else None
    if found is None or not isinstance(call, ast.Call):
        return {}
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    if ast.unparse(call.func).endswith("replace") and call.args:
        return _keywords(resolve(found.module, ast.unparse(call.args[0]))) | given
    return given


def _name(node: ast.expr | None) -> str | None:
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return None
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _class(found: Found | None, node: ast.expr | None) -> Found | None:
    name = _name(node)
    target = resolve(found.module, name) if found and name else None
    return target if target and isinstance(target.node, ast.ClassDef) else None


def _class_name(found: Found | None) -> str | None:
    return found.node.name if found and isinstance(found.node, ast.ClassDef) else None


def _is_v3(model: Found | None) -> bool:
    names = (
        [base.node.name for base in bases(model) if isinstance(base.node, ast.ClassDef)]
        if (model)
        else []
    )
    return any("ModuleV3" in name for name in names)


def _value(found: Found | None, node: ast.expr | None) -> object:
    """A keyword's literal value, followed through a name or a class attribute."""
    if found is None or node is None:
        return None
    value = literal(Found(found.module, node))
    if value is not None:
        return value
    return literal(resolve(found.module, ast.unparse(node)))


def _encodings(found: Found | None, given: dict[str, ast.expr]) -> tuple[str, ...]:
    default = _value(found, given.get("default_encoding"))
    rest = _value(found, given.get("supported_encodings"))
    names = sorted(str(name) for name in rest) if isinstance(rest, set | dict | list) else []
    first = [default] if isinstance(default, str) else []
    return tuple(first + [name for name in names if name != default])


def _strings(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else ()


def _arguments(value: object) -> dict[str, object]:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}
