"""The user cache: nothing half-written, whatever ends the writer."""

import pytest

from maxport.checkpoint.cache import cache_root, folder_moved_in_whole, write_whole


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_work_leaves_nothing(tmp_path, error):
    target = tmp_path / "deep" / "target"
    with pytest.raises(error), folder_moved_in_whole(target) as work:
        (work / "half").write_text("half")
        raise error
    assert list(target.parent.iterdir()) == []


def test_whole_work_appears_at_once(tmp_path):
    target = tmp_path / "target"
    with folder_moved_in_whole(target) as work:
        (work / "file").write_text("whole")
        assert not target.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
    assert (target / "file").read_text() == "whole"


def test_the_first_of_two_writers_wins(tmp_path):
    target = tmp_path / "target"
    with folder_moved_in_whole(target) as late:
        (late / "file").write_text("late")
        with folder_moved_in_whole(target) as early:
            (early / "file").write_text("early")
    assert (target / "file").read_text() == "early"
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_cache_file_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "blocked").write_text("")
    write_whole(tmp_path / "blocked" / "file", "text")
    write_whole(tmp_path / "ok" / "file", "text")
    assert [p.name for p in (tmp_path / "ok").iterdir()] == ["file"]


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXPORT_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("MAXPORT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "maxport"
