"""Which MAX is installed, which architectures it registers, and how a port directory is loaded.

A port directory is loaded as `max serve --custom-architectures DIR` does it: the parent folder goes
on `sys.path`, the folder's name is imported, and the module's `ARCHITECTURES` are registered.
Unlike MAX, everything is undone afterwards, so that two ports of one name can be judged in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxport.errors import MaxportError

V3_SUFFIX = "_ModuleV3"


def max_pin() -> str:
    """The MAX versions maxport supports, as its package metadata states them: `>=26.7,<26.8`."""
    for line in importlib.metadata.requires("maxport") or []:
        match = re.match(r"max(?:\[[^\]]*\])?\s*([<>=!~][^;]*)", line)
        if match:
            return ",".join(sorted(match.group(1).strip().split(","), reverse=True))
    return ""


def installed_max() -> str | None:
    """Version of the installed `max` package, None if there is none."""
    try:
        return importlib.metadata.version("max")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_max_version() -> str:
    """Version of the installed MAX.

    Raises:
        MaxportError: MAX is missing, or its version is outside the pin.
    """
    from packaging.specifiers import SpecifierSet

    pin, version = max_pin(), installed_max()
    if version is None:
        raise MaxportError("MAX is not installed", fix=f'pip install "max[serve]{pin}"')
    if not SpecifierSet(pin).contains(version, prereleases=True):
        raise MaxportError(
            f"MAX {version} is installed, maxport works with MAX {pin}",
            fix=f'pip install "max[serve]{pin}", or use the maxport release for MAX {version}',
        )
    try:
        import_serving()
    except ModuleNotFoundError as error:
        raise MaxportError(
            f"MAX {version} is installed without its serving extra (no module {error.name})",
            fix=f'pip install "max[serve]{pin}"',
        ) from error
    return version


def import_serving() -> None:
    """Import MAX's pipelines; the collector waits meanwhile, nothing imported is ever garbage."""
    if "max.pipelines.lib" in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("max.pipelines.lib")
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def native_names() -> list[str]:
    """Names of all architectures MAX registers, without importing any of them."""
    check_max_version()
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP

    return sorted({*ARCH_LOOKUP.architectures, *ARCH_LOOKUP._lazy_architectures})


def native_architecture(class_name: str, lane: str) -> Any:
    """MAX's own `SupportedArchitecture` for a Hugging Face class, in one lane.

    Args:
        class_name: As in `config.json`'s `architectures`, for example `LlamaForCausalLM`.
        lane: `v2` (graph API) or `v3` (ModuleV3).

    Raises:
        MaxportError: MAX registers none, or only in the other lane.
    """
    check_max_version()
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP

    plain = class_name.removesuffix(V3_SUFFIX)
    name = plain + V3_SUFFIX if lane == "v3" else plain
    architecture = ARCH_LOOKUP.resolve(name)
    if architecture is None:
        other = plain if lane == "v3" else plain + V3_SUFFIX
        known = set(native_names())
        fix = f"use --native {'v2' if lane == 'v3' else 'v3'}" if other in known else ""
        raise MaxportError(
            f"MAX {installed_max()} registers no {name}",
            where="max.pipelines.architectures",
            fix=fix or "port the model: maxport port MODEL",
        )
    return architecture


@contextlib.contextmanager
def registered(architecture: Any, class_name: str, encoding: str) -> Iterator[Any]:
    """Make MAX's look-ups of `class_name`, in both lanes, answer `architecture`; undo on exit.

    `encoding` is added to those the architecture supports: float32 shows rounding-free whether two
    graphs agree, also where MAX would only serve bfloat16.
    """
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP

    widened = dataclasses.replace(
        architecture, supported_encodings={*architecture.supported_encodings, encoding}
    )
    tables = ("architectures", "_architectures_by_task", "_lazy_architectures")
    saved = {table: dict(getattr(ARCH_LOOKUP, table)) for table in tables}
    ARCH_LOOKUP._bind_batch_processor(widened)
    plain = class_name.removesuffix(V3_SUFFIX)
    try:
        for name in (plain, plain + V3_SUFFIX):
            ARCH_LOOKUP._lazy_architectures.pop(name, None)
            ARCH_LOOKUP.architectures[name] = widened
            ARCH_LOOKUP._architectures_by_task[name, widened.task] = widened
        yield widened
    finally:
        for table, content in saved.items():
            getattr(ARCH_LOOKUP, table).clear()
            getattr(ARCH_LOOKUP, table).update(content)


@contextlib.contextmanager
def loaded_port(port_dir: Path) -> Iterator[list[Any]]:
    """The `ARCHITECTURES` of a port directory; its modules are forgotten on exit.

    Raises:
        MaxportError: No such folder, the import fails, or there is no `ARCHITECTURES` list.
    """
    check_max_version()
    folder = Path(port_dir).resolve()
    if not (folder / "__init__.py").is_file():
        raise MaxportError(
            "not a port directory: it has no __init__.py",
            where=str(port_dir),
            fix="pass the folder `maxport port` wrote, the one for --custom-architectures",
        )
    _check_name(folder)
    sys.path.insert(0, str(folder.parent))
    keep_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        importlib.invalidate_caches()
        yield _architectures(folder)
    finally:
        sys.dont_write_bytecode = keep_bytecode
        sys.path.remove(str(folder.parent))
        for name in [m for m in sys.modules if f"{m}.".startswith(f"{folder.name}.")]:
            del sys.modules[name]


def _architectures(folder: Path) -> list[Any]:
    try:
        module = importlib.import_module(folder.name)
    except Exception as error:
        raise MaxportError(
            f"the port does not import: {type(error).__name__}: {error}",
            where=str(folder),
            fix="run `maxport gates` on the port directory",
            code=1,
        ) from error
    architectures = getattr(module, "ARCHITECTURES", None)
    named = isinstance(architectures, list) and all(hasattr(a, "name") for a in architectures)
    if not architectures or not named:
        raise MaxportError(
            "the port exposes no ARCHITECTURES list of SupportedArchitecture",
            where=str(folder / "__init__.py"),
            fix="export ARCHITECTURES = [<the SupportedArchitecture of arch.py>]",
            code=1,
        )
    return list(architectures)


def _check_name(folder: Path) -> None:
    """Refuse a port that MAX could not import because another module has its name."""
    name = folder.name
    if not name.isidentifier():
        raise MaxportError(
            f"the port's folder name {name!r} is no Python module name",
            where=str(folder),
            fix="rename the folder",
        )
    other = getattr(sys.modules.get(name), "__file__", None)
    if other is None and name not in sys.modules:
        spec = importlib.util.find_spec(name)
        other = spec.origin or "a namespace package" if spec else None
    elif other is None:
        other = "built in"
    if other is not None and Path(other).resolve().parent != folder:
        raise MaxportError(
            f"the port's name {name} is taken by another Python module",
            where=str(other),
            fix="rename the port directory",
        )
