"""`maxport migrate`: packages, originals, reports, bad input."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from maxport.cli.migrate import command
from maxport.errors import MaxportError
from maxport.migrate import report
from maxport.migrate.classify import classify
from maxport.migrate.run import migrate
from maxport.migrate.sources import Sources, max_folder, reading_max
from maxport.migrate.target import open_target
from maxport.migrate.write import write_package

ARCHITECTURES = max_folder() / "pipelines" / "architectures"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, valid: Any) -> Path:
    """A copy of bert, migrated beside itself."""
    folder = tmp_path_factory.mktemp("arch") / "bert"
    shutil.copytree(ARCHITECTURES / "bert", folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    result = run(str(folder), "--json")
    assert result.exit_code == 0, result.output
    valid("migrate", result.stdout)
    (folder.parent / "report.json").write_text(result.output)
    assert {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()} == before
    return folder


def test_the_package_is_whole_and_v3(bert: Path) -> None:
    package = bert.parent / "bert_modulev3"
    for name in ("__init__", "arch", "model", "graph", "inputs", "batch_processor"):
        text = (package / f"{name}.py").read_text()
        compile(text, name, "exec")
        assert "from .." not in text
    assert "ARCHITECTURES = [bert_arch]" in (package / "__init__.py").read_text()
    assert 'name="BertModel_ModuleV3"' in (package / "arch.py").read_text()
    assert classify(open_target(str(package))).lane == "v3"
    graph = (package / "graph.py").read_text()
    assert "TensorValue" not in graph
    assert "# [1, seq_len]" in graph  # comments survive
    assert graph.startswith("# ===---")
    assert [p for p in bert.parent.iterdir() if p.name.startswith(".")] == []


def test_the_report_counts_and_points_at_v2_lines(bert: Path) -> None:
    body = json.loads((bert.parent / "report.json").read_text())
    assert body["counts"]["manual"] == 0
    assert sum(body["counts"].values()) == len(body["changes"])
    lines = (bert / "graph.py").read_text().splitlines()
    for change in body["changes"]:
        if change["file"] == "graph.py" and "ops.softmax" in change["what"]:
            assert "ops.softmax" in lines[change["line"] - 1]
            break
    else:
        raise AssertionError("no rewrite of ops.softmax")


def test_migrating_the_result_changes_nothing(bert: Path) -> None:
    result = run(str(bert.parent / "bert_modulev3"))
    assert result.exit_code == 0
    assert "nothing to do" in result.output


def test_an_existing_package_is_kept_unless_forced(bert: Path) -> None:
    package = bert.parent / "bert_modulev3"
    mark = package / "mine.txt"
    mark.write_text("kept")
    result = run(str(bert))
    assert isinstance(result.exception, MaxportError)
    assert "exists already" in str(result.exception)
    assert mark.read_text() == "kept"
    assert run(str(bert), "--force").exit_code == 0
    assert not mark.exists()


def test_check_writes_nothing(tmp_path: Path) -> None:
    result = run("mpnet", "--check", "-o", str(tmp_path))
    assert result.exit_code == 1
    assert list(tmp_path.iterdir()) == []
    assert run("mpnet_modulev3", "--check").exit_code == 0


def test_html_report_is_one_page(tmp_path: Path) -> None:
    result = migrate(open_target("mpnet"))
    assert result is not None
    page = report.to_html(result, {"summary": "equal"})
    assert "<script" not in page
    assert "Proof: equal" in page
    assert page.count("<details>") == len(result.before)
    assert "+from max.experimental import functional as F" in report.diff_of(result, "graph.py")


def test_a_single_file_with_its_own_layers(tmp_path: Path) -> None:
    file = tmp_path / "block.py"
    file.write_text(
        "from max.graph import TensorValue, ops\n"
        "from max.nn.layer import Module\n\n\n"
        "class Gate(Module):\n"
        "    def __call__(self, x: TensorValue) -> TensorValue:\n"
        "        return ops.silu(x) * x\n"
    )
    before = file.read_bytes()
    result = run(str(file))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "block_modulev3" / "block.py").read_text()
    assert "class Gate(Module[[Tensor], Tensor]):" in text
    assert "return F.silu(x) * x" in text
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.py", b"class (:\n", "not valid Python"),
        ("latin.py", b"# caf\xe9\nfrom max.nn.layer import Module\n", "not UTF-8"),
        ("plain.py", b"x = 1\n", "not a MAX model"),
        ("notes.txt", b"x", "not a Python file"),
    ],
)
def test_bad_files_are_refused_and_nothing_is_written(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    result = run(str(tmp_path / name))
    assert isinstance(result.exception, MaxportError)
    assert message in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_circular_imports_end_in_an_answer(tmp_path: Path) -> None:
    folder = tmp_path / "ring"
    folder.mkdir()
    (folder / "a.py").write_text("from .b import B\nclass A(B): pass\n")
    (folder / "b.py").write_text("from .a import A\nclass B(A): pass\n")
    result = run(str(folder))
    assert isinstance(result.exception, MaxportError)
    assert "not a MAX model" in str(result.exception)


def test_circular_imports_of_v2_layers_still_migrate(tmp_path: Path) -> None:
    folder = tmp_path / "ring"
    folder.mkdir()
    head = "from max.graph import TensorValue, ops\nfrom max.nn.layer import Module\n"
    layer = "(Module):\n    def __call__(self, x: TensorValue) -> TensorValue:\n"
    (folder / "net.py").write_text(
        f"{head}from .base import B\n\n\nclass A{layer}        return B()(ops.relu(x))\n"
    )
    (folder / "base.py").write_text(
        f"{head}from . import net\n\n\nclass B{layer}        return ops.silu(x)\n"
    )
    result = run(str(folder))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "ring_modulev3" / "net.py").read_text()
    assert "from .base import B" in text and "B()(F.relu(x))" in text
    assert "F.silu(x)" in (tmp_path / "ring_modulev3" / "base.py").read_text()


def test_an_html_report_that_cannot_be_written(tmp_path: Path) -> None:
    for page in (tmp_path / "none" / "page.html", tmp_path):
        result = run("mpnet", "-o", str(tmp_path / "out"), "--html", str(page))
        assert isinstance(result.exception, MaxportError)
        assert "cannot write the HTML report" in str(result.exception)
        assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_packages_place_stays(tmp_path: Path) -> None:
    place = tmp_path / "mpnet_modulev3"
    place.write_text("mine")
    result = run("mpnet", "-o", str(tmp_path), "--force")
    assert isinstance(result.exception, MaxportError)
    assert "no folder" in str(result.exception)
    assert place.read_text() == "mine"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    result = run("mpnet", "-o", str(tmp_path / "out"))
    assert isinstance(result.exception, MaxportError)
    assert "cannot write" in str(result.exception)
    assert not (tmp_path / "out").exists()


# Encoders, decoders, state-space and convolution layers, speech, diffusion; the bench does all 72.
SPREAD = ("bert", "mpnet", "umt5", "whisper", "flux2", "inkling", "qwen3_embedding", "olmo2")


def test_a_spread_of_architectures_migrates_once(tmp_path: Path) -> None:
    shared = Sources()
    for name in SPREAD:
        target = open_target(name, shared)
        before = {p: p.read_bytes() for p in target.files}
        result = migrate(target)
        assert result is not None, name
        for shown, text in result.files.items():
            compile(text, f"{name}/{shown}", "exec")
        package = tmp_path / result.plan.name
        write_package(result.files, package)
        assert migrate(open_target(str(package))) is None, name
        assert {p: p.read_bytes() for p in target.files} == before, name


@pytest.mark.parametrize("name", ["mpnet", "qwen3_embedding"])
def test_originals_stay_and_a_second_run_changes_nothing(name: str, tmp_path: Path) -> None:
    original = {p: p.read_bytes() for p in sorted((ARCHITECTURES / name).rglob("*.py"))}
    assert run(name, "-o", str(tmp_path)).exit_code == 0
    package = tmp_path / f"{name}_modulev3"
    written = {p: p.read_bytes() for p in sorted(package.rglob("*")) if p.is_file()}
    assert written
    assert {p: p.read_bytes() for p in original} == original
    again = run(str(package))
    assert again.exit_code == 0
    assert "nothing to do" in again.output
    assert {p: p.read_bytes() for p in sorted(package.rglob("*")) if p.is_file()} == written
    assert [p.name for p in tmp_path.iterdir()] == [package.name]


def test_the_whole_corpus_as_the_bench_found_it() -> None:
    """bench/migration.py runs every V2 architecture; its committed rows are the evidence."""
    path = Path(__file__).parents[2] / "bench" / "results" / "migration.json"
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 72
    assert {row["classified"] for row in rows} == {"v2"}
    migrated = [row for row in rows if row.get("counts")]
    assert all(row["original_unchanged"] for row in migrated)
    assert {row["again"] for row in migrated} == {"nothing"}
    assert [row["name"] for row in migrated if row["syntax_errors"]] == []
    assert [row["name"] for row in rows if row["verdict"] == "error"] == []


def test_another_release_is_read_in_place_of_the_installed(tmp_path: Path) -> None:
    folder = tmp_path / "max"
    for name, text in {
        "nn/__init__.py": "",
        "nn/layer/__init__.py": "from .layer import Module",
        "nn/layer/layer.py": "class Layer: pass\nclass Module(Layer): pass\n",
        "pipelines/architectures/old/__init__.py": "",
        "pipelines/architectures/old/net.py": (
            "from max.graph import TensorValue, ops\nfrom max.nn.layer import Module\n\n\n"
            "class Net(Module):\n    def __call__(self, x: TensorValue) -> TensorValue:\n"
            "        return ops.relu(x)\n"
        ),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with reading_max(folder):
        target = open_target("old")
        assert classify(target).lane == "v2"
        result = migrate(target)
    assert result is not None
    assert "return F.relu(x)" in result.files["net.py"]
    with pytest.raises(MaxportError, match="no such file"):
        open_target("old")


@pytest.mark.slow
def test_a_changed_copy_is_proven_against_itself(tmp_path: Path, valid: Any) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(ARCHITECTURES / "bert", folder, ignore=shutil.ignore_patterns("__pycache__"))
    graph = folder / "graph.py"
    text = graph.read_text()
    assert "ops.softmax(" in text
    graph.write_text(text.replace("ops.softmax(", "ops.tanh("))
    body = valid("migrate", run(str(folder), "--prove", "--json").stdout)
    assert body["proof"]["verdict"] == "equal"
    assert isinstance(body["types"], list)


@pytest.mark.slow
def test_the_proof_of_an_encoder(tmp_path: Path) -> None:
    result = run("bert", "-o", str(tmp_path), "--prove", "--json")
    body = json.loads(result.output[result.output.index("{\n") :])
    assert body["proof"]["verdict"] == "equal"
    assert body["proof"]["modes"][0]["parameters"] == 37
    assert result.exit_code == 0
