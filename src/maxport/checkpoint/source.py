"""What a place that holds a checkpoint can do, and the local folder as such a place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from maxport.checkpoint.headers import TensorHeader, read_header
from maxport.errors import MaxportError


class Source(Protocol):
    """A folder or a Hub repository at one revision."""

    @property
    def where(self) -> str:
        """How to name the place in messages."""

    @property
    def folder(self) -> Path:
        """Local folder that holds what `read` and `fetch` have brought so far."""

    def files(self) -> Mapping[str, int | None]:
        """Names of the top-level files with their sizes in bytes, None where unknown."""

    def read(self, name: str) -> bytes:
        """The whole of a small file."""

    def headers(self, names: Sequence[str]) -> list[tuple[TensorHeader, ...]]:
        """safetensors headers of several files, without their data."""

    def fetch(self, names: Sequence[str]) -> Path:
        """Bring these files, whole, into one local folder and return it."""


class LocalSource:
    """A checkpoint folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        """The folder's path."""
        return str(self._folder)

    @property
    def folder(self) -> Path:
        """The folder itself."""
        return self._folder

    def files(self) -> Mapping[str, int | None]:
        """Files directly in the folder; a dangling link has size None."""
        try:
            return {p.name: _size(p) for p in sorted(self._folder.iterdir()) if not p.is_dir()}
        except OSError as error:
            raise MaxportError(
                "the checkpoint folder cannot be read", where=f"{self.where}: {error.strerror}"
            ) from error

    def read(self, name: str) -> bytes:
        """The bytes of one file.

        Raises:
            MaxportError: It cannot be read.
        """
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            raise MaxportError(
                f"{name} cannot be read", where=f"{self._folder / name}: {error.strerror}"
            ) from error

    def headers(self, names: Sequence[str]) -> list[tuple[TensorHeader, ...]]:
        """Headers read from the first bytes of each file."""
        return [read_header(self._folder / name, name) for name in names]

    def fetch(self, names: Sequence[str]) -> Path:
        """Everything is local already."""
        return self._folder


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
