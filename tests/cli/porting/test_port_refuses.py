"""Whatever is wrong with what `port` is given: one clear error, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run
from fake_checkpoints import LLAMA, header_of, llama_shapes, make_checkpoint, write_safetensors

from maxport.children import child_environment

Make = Callable[[Path], object]


def config_text(folder: Path, text: str) -> None:
    make_checkpoint(folder)
    (folder / "config.json").write_text(text, "utf-8")


def without(key: str) -> dict[str, object]:
    return {k: v for k, v in LLAMA.items() if k != key}


def only_bin(folder: Path) -> None:
    make_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


def truncated(folder: Path) -> None:
    make_checkpoint(folder)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 64)


def missing_shard(folder: Path) -> None:
    make_checkpoint(folder, shards=2)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 2
    shards[1].unlink()


def lying_header(folder: Path) -> None:
    make_checkpoint(folder)
    header = header_of(llama_shapes())
    header["lm_head.weight"]["shape"][0] *= 2
    write_safetensors(folder / "model.safetensors", header)


def remote_code(folder: Path) -> None:
    auto_map = {"AutoConfig": "conf.ZedConfig", "AutoModelForCausalLM": "model.ZedForCausalLM"}
    make_checkpoint(folder, {**LLAMA, "model_type": "zed", "auto_map": auto_map})


#: Name -> (how the checkpoint is made, what the error must say).
BAD: dict[str, tuple[Make, tuple[str, ...]]] = {
    "no such folder": (lambda f: None, ("no such", "folder")),
    "no config.json": (lambda f: (make_checkpoint(f) / "config.json").unlink(), ("config.json",)),
    "not JSON": (lambda f: config_text(f, "{'a': 1}"), ("config.json", "JSON")),
    "not an object": (lambda f: config_text(f, "[1, 2]"), ("config.json", "object")),
    "unknown model type": (
        lambda f: make_checkpoint(f, {**LLAMA, "model_type": "zed"}),
        ("zed", "model type"),
    ),
    "architectures missing": (
        lambda f: make_checkpoint(f, without("architectures")),
        ("architectures",),
    ),
    "remote code": (remote_code, ("--trust-remote-code",)),
    "only .bin weights": (only_bin, (".bin", "safetensors")),
    "truncated shard": (truncated, ("model.safetensors",)),
    "missing shard": (missing_shard, ("model-00002-of-00002.safetensors",)),
    "lying header": (lying_header, ("lm_head.weight",)),
    "no decoder": (
        lambda f: make_checkpoint(
            f, {**LLAMA, "model_type": "vit", "architectures": ["ViTForImageClassification"]}
        ),
        ("ViT", "decoder"),
    ),
}


def refused(done: object, *words: str) -> None:
    """One error of three lines at most, with its fix; no traceback; exit code 2."""
    assert done.returncode == 2, done  # type: ignore[attr-defined]
    text = done.stderr  # type: ignore[attr-defined]
    assert text.startswith("error: ") and "\n  fix: " in text and "Traceback" not in text, text
    assert sum(line.startswith(("error:", "  where:", "  fix:")) for line in text.splitlines()) <= 3
    for word in words:
        assert word.lower() in text.lower(), text


@pytest.mark.parametrize("name", BAD)
def test_a_bad_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    make, words = BAD[name]
    make(tmp_path / "model")
    refused(run("port", tmp_path / "model", "-o", tmp_path / "out", "--yes"), *words)
    assert not (tmp_path / "out").exists()


def test_no_such_id(tmp_path: Path) -> None:
    refused(run("port", "nobody/nothing", "-o", tmp_path / "out", "--yes"), "nobody/nothing")
    assert not (tmp_path / "out").exists()


def test_an_existing_port_is_kept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    mine = tmp_path / "out" / "llama_port"
    mine.mkdir(parents=True)
    (mine / "mine.py").write_text("x = 1\n", "utf-8")
    refused(run("port", tmp_path / "model", "-o", tmp_path / "out", "--yes"), "--force")
    assert [p.name for p in mine.iterdir()] == ["mine.py"]


def test_the_output_path_is_a_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    (tmp_path / "out").write_text("mine", "utf-8")
    refused(run("port", tmp_path / "model", "-o", tmp_path / "out", "--yes"), "file")
    assert (tmp_path / "out").read_text("utf-8") == "mine"


def test_the_output_path_is_not_writable(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    refused(run("port", tmp_path / "model", "-o", "/proc/ports", "--yes"), "/proc/ports")


@pytest.mark.parametrize("slug", ["../out", "a-b", "1st", "class", "a/b", "", "torch"])
def test_a_slug_that_is_no_package_name(slug: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    arguments = ("-o", tmp_path / "out", "--yes", f"--slug={slug}")
    refused(run("port", tmp_path / "model", *arguments), "slug")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_another_version_of_max(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxport.plan.max_source.max_version", lambda: "26.8.0")
    make_checkpoint(tmp_path / "model")
    done = run("port", tmp_path / "model", "-o", tmp_path / "out", "--yes")
    refused(done, "26.8.0", "26.7", "pip install")
    assert not (tmp_path / "out").exists()


def test_an_error_as_json(tmp_path: Path) -> None:
    done = run("port", tmp_path / "nothing", "-o", tmp_path / "out", "--json")
    assert done.returncode == 2
    assert set(json.loads(done.stdout)) == {"error", "where", "fix"}


#: A process started in the background inherits that Ctrl-C is ignored: undone first.
HELD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import maxport.emit.write as write

def held(*arguments, **options):
    print("formatting", flush=True)
    time.sleep(100)

write.format_folder = held
from maxport.cli import main
sys.argv[0] = "maxport"
main()
"""


def test_ctrl_c_while_the_port_is_written(tmp_path: Path) -> None:
    """The signal comes while the staging folder is there: neither it nor half a port stays."""
    make_checkpoint(tmp_path / "model")
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, "port", tmp_path / "model", "-o", out, "--yes"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    assert any(line == "formatting\n" for line in process.stdout)
    assert len(list(out.iterdir())) == 1
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "nothing was written" in errors
    assert not out.exists()
