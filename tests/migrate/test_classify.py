"""`maxport classify`: the 26.7 census, single files, copies, and bad input."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from maxport.children import child_environment
from maxport.cli.classify import command
from maxport.errors import MaxportError
from maxport.migrate.classify import classify
from maxport.migrate.sources import Sources, max_folder
from maxport.migrate.target import installed_architectures, open_target

# V3 under a name without the suffix, from reading each of them (the 26.7 census).
V3_WITHOUT_SUFFIX = {
    "ideogram4", "mamba", "minimax_music3", "muse_glimmer", "olmo3", "unified_dspark_nemotron_h",
}  # fmt: skip


def test_every_installed_architecture_as_in_the_census() -> None:
    names, shared = installed_architectures(), Sources()
    expected = {
        name: "v3" if name.endswith("_modulev3") or name in V3_WITHOUT_SUFFIX else "v2"
        for name in names
    }
    found = {name: classify(open_target(name, shared)).lane for name in names}
    assert found == expected
    assert sum(lane == "v2" for lane in found.values()) == 72
    assert sum(lane == "v3" for lane in found.values()) == 33


@pytest.mark.parametrize("name", ["granite", "olmo", "phi3", "qwen2"])
def test_v2_only_through_its_bases(name: str) -> None:
    result = classify(open_target(name))
    assert result.lane == "v2"
    assert "llama3" in result.follows
    assert not [c for f in result.files for c in f.classes if c.role == "layer"]


def test_a_copied_architecture_still_finds_its_donor(tmp_path: Path) -> None:
    donor = max_folder() / "pipelines" / "architectures" / "qwen2"
    copy = tmp_path / "my_qwen"
    copy.mkdir()
    for file in donor.glob("*.py"):
        (copy / file.name).write_bytes(file.read_bytes())
    result = classify(open_target(str(copy)))
    assert result.lane == "v2"
    assert "llama3" in result.follows


def test_mixed_file_and_class(tmp_path: Path) -> None:
    file = tmp_path / "block.py"
    file.write_text(
        "from max.experimental.nn import Module\n"
        "from max.graph import TensorValue\n"
        "class A(Module):\n"
        "    def forward(self, x: TensorValue) -> TensorValue:\n"
        "        return x\n"
        "class B(Module):\n"
        "    pass\n"
    )
    result = classify(open_target(str(file)))
    assert result.files[0].lane == "mixed"
    assert [(c.name, c.lane, c.line) for c in result.files[0].classes] == [
        ("A", "mixed", 3), ("B", "v3", 6),
    ]  # fmt: skip


def test_settings_from_max_nn_do_not_make_a_file_v2(tmp_path: Path) -> None:
    file = tmp_path / "conf.py"
    file.write_text("from max.nn.kv_cache import KVCacheParams\nfrom max.graph import DeviceRef\n")
    assert classify(open_target(str(file))).lane == "neither"


def test_circular_imports_end(tmp_path: Path) -> None:
    folder = tmp_path / "ring"
    folder.mkdir()
    (folder / "a.py").write_text("from .b import X\nclass A(X): pass\n")
    (folder / "b.py").write_text("from .a import A as X\n")
    assert classify(open_target(str(folder))).lane == "neither"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"def broken(:\n", "not valid Python"), (b"x = '\xff\xfe'\n", "not UTF-8")],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.py"
    file.write_bytes(content)
    with pytest.raises(MaxportError, match=message) as caught:
        classify(open_target(str(file)))
    assert "bad.py" in caught.value.where


def test_unknown_names_get_suggestions() -> None:
    with pytest.raises(MaxportError, match="llama3"):
        open_target("lama3")


def test_json_and_no_heavy_imports_under_a_second(valid: Any) -> None:
    result = CliRunner().invoke(command, ["llama3", "--json"])
    assert result.exit_code == 0
    body = valid("classify", result.output)
    assert body["lane"] == "v2"
    assert {f["path"]: f["lane"] for f in body["files"]}["llama3.py"] == "v2"
    start = time.process_time()
    classify(open_target("llama3"))
    assert time.process_time() - start < 1.0
    probe = (
        "import sys; from maxport.migrate.classify import classify;"
        "from maxport.migrate.target import open_target; classify(open_target('bert'));"
        "assert not {'torch', 'max.graph', 'max.driver', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60, env=child_environment())


@pytest.mark.parametrize(
    ("base", "lane"), [("max.nn.layer", "v2"), ("max.experimental.nn.module", "v3")]
)
def test_a_pipeline_base_of_both_generations_is_told_by_what_it_builds(
    tmp_path: Path, base: str, lane: str
) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "net.py").write_text(
        f"from {base} import Module\n\n\nclass Net(Module):\n    pass\n"
        + "".join(
            f"class Part{i}(Vision):\n    pass\n" for i in range(2)
        )  # more layers of V3 than of V2 beside the model
        + "\nfrom max.experimental.nn.module import Module as Vision\n"
    )
    (folder / "model.py").write_text(
        "from max.pipelines.lib import PipelineModelWithKVCache\n\nfrom .net import Net\n\n\n"
        "class OldModel(PipelineModelWithKVCache):\n"
        "    def build(self):\n        return Net()\n\n\n"
        "class OtherModel(OldModel):\n    pass\n"
    )
    (folder / "arch.py").write_text(
        "from max.pipelines.lib import SupportedArchitecture\n\nfrom .model import OtherModel\n\n"
        'old = SupportedArchitecture(name="Old", pipeline_model=OtherModel)\n'
    )
    result = classify(open_target(str(folder)))
    assert result.lane == lane
    found = {c.name: c for f in result.files for c in f.classes if c.role == "pipeline"}
    assert {c.lane for c in found.values()} == {lane}
    assert found["OtherModel"].why.startswith("builds ") and found["OtherModel"].why.endswith("Net")
