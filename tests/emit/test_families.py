"""Every dense family: the emitted port is clean, short, free of sizes, and its adapter is stable.

The ports are emitted once and checked together; whether they compute the right thing is shown by
`make bench-families`, and for a few families by tests/emit/test_ports.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import util
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from families import DENSE

from maxport.children import child_environment

pytestmark = pytest.mark.families

LIMIT = 450


def emit(name: str, folder: str) -> tuple[str, str]:
    """Write one family's port; returns its name and what went wrong, if anything."""
    import warnings

    warnings.filterwarnings("ignore")
    from maxport.emit.write import write_port
    from maxport.errors import MaxportError
    from maxport.trace.port import make_port
    from maxport.twin import default_config

    slug = "port_" + re.sub(r"\W", "_", name)
    try:
        port = make_port(default_config(name), slug=slug)
        write_port(Path(folder), slug, port.files)
    except MaxportError as error:
        return name, str(error)
    return name, ""


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("ports")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        done = dict(pool.map(emit, DENSE, [str(folder)] * len(DENSE)))
    yield folder, done


def ports(folder: Path) -> list[Path]:
    return sorted(folder.glob("port_*"))


def test_every_family_is_emitted(emitted: tuple[Path, dict[str, str]]) -> None:
    failures = {n: why for n, why in emitted[1].items() if why}
    assert not failures


def run_tool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python tool in `folder`, untouched by what importing MAX does to the environment."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=child_environment()
    )


def test_ruff_finds_nothing(emitted: tuple[Path, dict[str, str]]) -> None:
    done = run_tool(emitted[0], "ruff", "check", "--isolated", "--line-length", "100", ".")
    assert done.returncode == 0, done.stdout


def test_mypy_finds_nothing(emitted: tuple[Path, dict[str, str]]) -> None:
    options = ("--ignore-missing-imports", "--follow-imports=silent", "--no-error-summary")
    done = run_tool(emitted[0], "mypy", *options, *(p.name for p in ports(emitted[0])))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_no_file_is_long(emitted: tuple[Path, dict[str, str]]) -> None:
    long = [f for f in emitted[0].rglob("*.py") if f.read_text("utf-8").count("\n") > LIMIT]
    assert not long


def test_no_size_literal(emitted: tuple[Path, dict[str, str]]) -> None:
    """Numbers in a graph are small constants of the model: sizes come from the configuration."""
    found = []
    for port in ports(emitted[0]):
        tree = ast.parse((port / f"{port.name}.py").read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 4:
                found.append(f"{port.name}:{node.lineno}: {node.value}")
    assert not found


def load_adapter(port: Path) -> Any:
    spec = util.spec_from_file_location(f"adapter_{port.name}", port / "weight_adapters.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Entry:
    """A checkpoint's tensor as MAX hands it to adapters."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def data(self) -> Any:
        return self.weight


def stored(port: Path) -> dict[str, Entry]:
    """What a checkpoint of the family at another size stores: tied weights once."""
    from max.graph.weights import WeightData

    from maxport.twin import default_config, twin_config, twin_model

    name = next(n for n in DENSE if "port_" + re.sub(r"\W", "_", n) == port.name)
    model = twin_model(twin_config(default_config(name), 2))
    entries, seen = {}, set()
    for key, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            array = tensor.float().contiguous().numpy()
            entries[key] = Entry(WeightData.from_numpy(array, key))
    return entries


def test_an_adapter_run_twice_gives_what_once_gives(emitted: tuple[Path, dict[str, str]]) -> None:
    import numpy as np

    for port in ports(emitted[0]):
        adapter = load_adapter(port).convert_safetensor_state_dict
        once = adapter(stored(port))
        twice = adapter(once)
        assert list(once) == list(twice) and once, port.name
        for key, weight in once.items():
            a, b = np.from_dlpack(weight.data), np.from_dlpack(twice[key].data)
            assert a.shape == b.shape and (a == b).all(), f"{port.name} {key}"
