"""`port` reads checkpoints made byte by byte, and runs as a user runs it."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "checkpoint"), str(TESTS / "cli" / "reading")]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MAXPORT_CACHE", str(tmp_path_factory.getbasetemp() / "porting-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
