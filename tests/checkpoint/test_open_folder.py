"""open_checkpoint on local folders: what it reads, and one clear error per bad input."""

import json
import struct
import subprocess
import sys

import pytest
from fake_checkpoints import (
    LLAMA,
    header_of,
    llama_shapes,
    make_checkpoint,
    write_safetensors,
)

from maxport.checkpoint import known_architectures, known_model_types, open_checkpoint
from maxport.children import child_environment
from maxport.errors import MaxportError


def test_single_file(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    opened = open_checkpoint(str(folder))
    assert opened.folder == folder and opened.weights_folder() == folder
    assert opened.revision is None and opened.architecture == "LlamaForCausalLM"
    assert opened.config == LLAMA and opened.generation_config == {"eos_token_id": 2}
    assert opened.tokenizer_files == ("tokenizer.json", "tokenizer_config.json")
    k_proj = opened.tensors["model.layers.1.self_attn.k_proj.weight"]
    assert (k_proj.dtype, k_proj.shape, k_proj.file) == ("BF16", (32, 64), "model.safetensors")
    assert k_proj.nbytes == k_proj.end - k_proj.start == 32 * 64 * 2
    assert opened.nbytes == sum(t.size * 2 for t in opened.tensors.values())


def test_offsets_are_file_offsets(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    file = folder / "model.safetensors"
    tensor = open_checkpoint(str(folder)).tensors["model.norm.weight"]
    with file.open("r+b") as stream:
        stream.seek(tensor.start)
        stream.write(b"\x80\x3f" * 64)
    from safetensors import safe_open

    with safe_open(file, "pt") as stream:
        assert stream.get_tensor("model.norm.weight").sum().item() == 64


def test_shards_give_the_same_tensors(tmp_path):
    one = open_checkpoint(str(make_checkpoint(tmp_path / "one"))).tensors
    three = open_checkpoint(str(make_checkpoint(tmp_path / "three", shards=3))).tensors
    assert {n: (t.dtype, t.shape) for n, t in one.items()} == {
        n: (t.dtype, t.shape) for n, t in three.items()
    }
    assert len({t.file for t in three.values()}) == 3


def test_config_only_folder_has_no_tensors(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    opened = open_checkpoint(str(tmp_path))
    assert opened.tensors == {} and opened.generation_config is None
    with pytest.raises(MaxportError, match="a config but no weights"):
        opened.weights_folder()


def test_imports_neither_torch_nor_max(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    code = (
        "import sys; from maxport.checkpoint import open_checkpoint;"
        f"open_checkpoint({str(folder)!r});"
        "print([n for n in ('torch', 'max', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=child_environment(),
    )
    assert done.stdout.strip() == "[]"


def test_known_tables_agree_with_transformers():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert known_model_types() >= set(CONFIG_MAPPING_NAMES)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert known_architectures() >= {c for c in classes if isinstance(c, str)}


def write_config(folder, text):
    make_checkpoint(folder)
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def without(key):
    return json.dumps({k: v for k, v in LLAMA.items() if k != key})


REMOTE = {
    "AutoConfig": "configuration_x.XConfig",
    "AutoModelForCausalLM": "modeling_x.XForCausalLM",
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\xff\xfe{}", "not UTF-8"),
        ("[1]", "must be a JSON object, but it is a list"),
        ("null", "must be a JSON object, but it is null"),
        ("3", "must be a JSON object, but it is a number"),
        ("[" * 100_000, "nested too deeply"),
        (without("architectures"), "`architectures` is missing"),
        (without("model_type"), "`model_type` in config.json is missing"),
        (json.dumps({**LLAMA, "model_type": ["llama"]}), "missing or no string"),
        (json.dumps({**LLAMA, "architectures": []}), "`architectures` is \\[\\]"),
        (json.dumps({**LLAMA, "architectures": "Llama"}), '`architectures` is "Llama"'),
        (json.dumps({**LLAMA, "architectures": [3]}), "`architectures` is \\[3\\]"),
    ],
)
def test_bad_config(tmp_path, text, message):
    write_config(tmp_path / "m", text)
    with pytest.raises(MaxportError, match=message) as caught:
        open_checkpoint(str(tmp_path / "m"))
    assert caught.value.code == 2 and "config.json" in caught.value.where


def test_no_config(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(MaxportError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such", "./none", "~/no_such_folder", "a/b/c", "x.gguf"])
def test_no_such_folder(name):
    with pytest.raises(MaxportError, match="no such checkpoint folder or file"):
        open_checkpoint(name)


@pytest.mark.parametrize("name", ["", "a b", "--x", "a\0b", "n" * 300])
def test_impossible_names(name):
    with pytest.raises(MaxportError):
        open_checkpoint(name)


def test_revision_of_a_folder(tmp_path):
    with pytest.raises(MaxportError, match="--revision applies to Hub ids"):
        open_checkpoint(str(make_checkpoint(tmp_path / "m")), revision="main")


def test_a_file_that_is_no_gguf(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    with pytest.raises(MaxportError, match="not a GGUF file"):
        open_checkpoint(str(folder / "model.safetensors"))


@pytest.mark.parametrize(
    "change",
    [{"model_type": "my_llama"}, {"architectures": ["MyLlamaForCausalLM"]}],
    ids=["unknown type", "unknown class of a known type"],
)
def test_remote_code_needs_consent(tmp_path, change):
    write_config(tmp_path / "m", json.dumps({**LLAMA, "auto_map": REMOTE, **change}))
    (tmp_path / "m/modeling_x.py").write_text("raise SystemExit('must never run here')")
    with pytest.raises(MaxportError, match="--trust-remote-code"):
        open_checkpoint(str(tmp_path / "m"))
    assert open_checkpoint(str(tmp_path / "m"), trust_remote_code=True).tensors
    assert open_checkpoint(str(tmp_path / "m"), inspect_only=True).tensors


def test_left_over_auto_map_of_an_adopted_model_is_fine(tmp_path):
    write_config(tmp_path / "m", json.dumps({**LLAMA, "auto_map": REMOTE}))
    assert open_checkpoint(str(tmp_path / "m")).tensors


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.onnx", "tf_model.h5"]
)
def test_only_other_weight_formats(tmp_path, name):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(MaxportError, match="weights only as") as caught:
        open_checkpoint(str(tmp_path))
    assert name in caught.value.where
    assert open_checkpoint(str(tmp_path), inspect_only=True).other_weights == (name,)


def test_bin_beside_safetensors_is_fine(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert open_checkpoint(str(tmp_path)).tensors


def test_adapter_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(MaxportError, match="merge the adapter"):
        open_checkpoint(str(tmp_path))


def test_truncated_shard(tmp_path):
    folder = make_checkpoint(tmp_path, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)
    with pytest.raises(MaxportError, match="truncated") as caught:
        open_checkpoint(str(folder))
    assert shard.name in caught.value.where


def test_missing_shard(tmp_path):
    folder = make_checkpoint(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(MaxportError, match="names 1 shard"):
        open_checkpoint(str(folder))


def test_dangling_link_to_a_shard(tmp_path):
    folder = make_checkpoint(tmp_path, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(folder / "gone")
    with pytest.raises(MaxportError, match="cannot be read"):
        open_checkpoint(str(folder))


def test_shards_without_index(tmp_path):
    folder = make_checkpoint(tmp_path, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(MaxportError, match=r"no model\.safetensors\.index\.json"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("weight_map"), "no weight_map"),
        (lambda index: index.update(weight_map=[]), "no weight_map"),
        (lambda index: index["weight_map"].update({"x": "../m.safetensors"}), "no file name"),
        (lambda index: index["weight_map"].update({"x": 3}), "no file name"),
        (
            lambda index: index["weight_map"].update({"x": "model-00001-of-00002.safetensors"}),
            "places x in model-00001-of-00002.safetensors, but no shard has it",
        ),
        (
            lambda index: index["weight_map"].update(
                {"lm_head.weight": "model-00001-of-00002.safetensors"}
            ),
            "but it is in model-00002-of-00002.safetensors",
        ),
    ],
)
def test_wrong_index(tmp_path, change, message):
    folder = make_checkpoint(tmp_path, shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(MaxportError, match=message):
        open_checkpoint(str(folder))


def test_a_tensor_in_two_shards(tmp_path):
    folder = make_checkpoint(tmp_path, shards=2)
    for shard in folder.glob("*.safetensors"):
        write_safetensors(shard, header_of(llama_shapes()))
    with pytest.raises(MaxportError, match="is in two shards"):
        open_checkpoint(str(folder))


def lie(**change):
    header = header_of({"a": ("F32", [4, 4]), "b": ("F32", [4])})
    header["b"].update(change)
    return header


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (lie(shape=[5]), "b is F32 \\[5\\], which takes 20 bytes, but its data_offsets span 16"),
        (lie(dtype="F16"), "takes 8 bytes"),
        (lie(dtype="Q4"), "unknown dtype 'Q4'"),
        (lie(dtype=3), "unknown dtype 3"),
        (lie(shape=[-4]), "impossible shape"),
        (lie(shape=[True]), "impossible shape"),
        (lie(shape=None), "impossible shape"),
        (lie(data_offsets=[48, 64]), "b overlaps a"),
        (lie(data_offsets=[68, 84]), "4 bytes before b belong to no tensor"),
        (lie(data_offsets=[80, 64]), "impossible data_offsets"),
        (lie(data_offsets=[64]), "impossible data_offsets"),
        ({"a": 3}, "entry of a is not an object"),
        (b"[]", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "'a' is listed twice"),
    ],
)
def test_header_that_lies(tmp_path, header, message):
    make_checkpoint(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", header, 80)
    with pytest.raises(MaxportError, match=message):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("size", "message"), [(79, "promises more bytes than there are"), (90, "10 bytes after")]
)
def test_file_size_and_header_disagree(tmp_path, size, message):
    make_checkpoint(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", lie(), size)
    with pytest.raises(MaxportError, match=message):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has no header"),
        (b"1234", "it has no header"),
        (b"<!DOCTYPE html><html>", "impossible header length"),
        (struct.pack("<Q", 900) + b"{}", "truncated inside its header"),
    ],
)
def test_file_that_is_no_safetensors(tmp_path, data, message):
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(MaxportError, match=message):
        open_checkpoint(str(tmp_path))
