"""Twins and ports that the judge's tests share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

PORTS = Path(__file__).parent.parent / "fixtures" / "ports"


@pytest.fixture(scope="session")
def helium_port() -> Path:
    return PORTS / "helium"


@pytest.fixture(scope="session")
def helium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _twin("helium", tmp_path_factory.mktemp("helium") / "twin")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # MAX 26.7's V2 llama sizes its rope by hidden_size / heads, whatever head_dim says.
    return _twin("llama", tmp_path_factory.mktemp("llama") / "twin", head_dim=14)


def _twin(model_type: str, folder: Path, **changes: object) -> Path:
    from maxport.twin import default_config, save_twin, twin_config

    config = twin_config(default_config(model_type), 1)
    for name, value in changes.items():
        setattr(config, name, value)
    return save_twin(config, folder)


@pytest.fixture
def edited_port(helium_port: Path, tmp_path: Path) -> Callable[[str, str, str], Path]:
    """The Helium port with one text replaced in one file; the text must be there."""

    def edit(file: str, old: str, new: str) -> Path:
        target = tmp_path / "helium"
        shutil.copytree(helium_port, target)
        path = target / file
        text = path.read_text("utf-8")
        assert text.count(old) >= 1, f"{file} has no {old!r}"
        path.chmod(0o644)
        path.write_text(text.replace(old, new), "utf-8")
        return target

    return edit
