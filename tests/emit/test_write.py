"""Ports are written in whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maxport.emit import write
from maxport.emit.write import write_port
from maxport.errors import MaxportError

GOOD = {"__init__.py": '"""A port."""\n'}


def test_files_are_formatted_and_nothing_else_is_left(tmp_path: Path) -> None:
    port = write_port(
        tmp_path / "new" / "ports", "small_port", {"__init__.py": '"""A."""\nx = {"a":1}\n'}
    )
    assert port == tmp_path / "new" / "ports" / "small_port"
    assert (port / "__init__.py").read_text() == '"""A."""\n\nx = {"a": 1}\n'
    assert os.listdir(port.parent) == ["small_port"]


def test_an_existing_port_is_replaced_only_with_force(tmp_path: Path) -> None:
    port = write_port(tmp_path, "small_port", GOOD | {"old.py": '"""Old."""\n'})
    with pytest.raises(MaxportError, match=r"exists already.*--force"):
        write_port(tmp_path, "small_port", GOOD)
    assert (port / "old.py").exists()
    write_port(tmp_path, "small_port", GOOD, force=True)
    assert os.listdir(port) == ["__init__.py"] and os.listdir(tmp_path) == ["small_port"]


@pytest.mark.parametrize("slug", ["my-port", "../escape", "a/b", "", ".", "2fast", "class"])
def test_slugs_that_are_no_identifier(tmp_path: Path, slug: str) -> None:
    with pytest.raises(MaxportError, match="cannot be the name of a port"):
        write_port(tmp_path / "out", slug, GOOD)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("slug", ["json", "sys", "transformers"])
def test_slugs_that_an_installed_package_has(tmp_path: Path, slug: str) -> None:
    with pytest.raises(MaxportError, match="an installed package is called"):
        write_port(tmp_path / "out", slug, GOOD)


def test_the_output_path_or_a_parent_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(MaxportError, match="is a file"):
            write_port(folder, "small_port", GOOD)
    (tmp_path / "small_port").write_text("mine")
    with pytest.raises(MaxportError, match="the port's folder is a file"):
        write_port(tmp_path, "small_port", GOOD, force=True)
    assert (tmp_path / "file").read_text() == (tmp_path / "small_port").read_text() == "mine"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(MaxportError, match="not writable"):
        write_port(tmp_path / "out", "small_port", GOOD)
    assert os.listdir(tmp_path) == []


def test_code_that_ruff_refuses_is_not_written(tmp_path: Path) -> None:
    for source in ('"""A."""\nundefined\n', '"""A."""\ndef (:\n'):
        with pytest.raises(MaxportError, match="emitted code fails ruff"):
            write_port(tmp_path / "new" / "out", "small_port", {"__init__.py": source})
    with pytest.raises(MaxportError, match="outside the port's folder"):
        write_port(tmp_path, "small_port", {"../evil.py": ""})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("moment", ["format_folder", "_move_in"])
def test_ctrl_c_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    port = write_port(tmp_path, "small_port", GOOD | {"old.py": '"""Old."""\n'})

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write, moment, stop)
    with pytest.raises(KeyboardInterrupt):
        write_port(tmp_path, "small_port", GOOD, force=True)
    with pytest.raises(KeyboardInterrupt):
        write_port(tmp_path / "deep" / "out", "other", GOOD)
    assert os.listdir(tmp_path) == ["small_port"] and (port / "old.py").exists()
