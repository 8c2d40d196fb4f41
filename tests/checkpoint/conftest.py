"""Every test here has its own user cache."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MAXPORT_CACHE", str(folder))
    return folder
