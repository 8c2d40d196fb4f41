"""check-walls: each kind of wall from a checkpoint that has it, and none from one that has not."""

import json

import pytest
from commands import report, run
from fake_checkpoints import LLAMA, llama_shapes, make_checkpoint

GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
GPU = ("--device", "gpu", "--device-memory", 80)
CPU = ("--device", "cpu", "--device-memory", 80)


def fp8(**changes):
    base = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def compressed(strategy="channel", inputs="token", kind="float", bits=8, form="float-quantized"):
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": False}
    if strategy == "group":
        weights["group_size"] = 128
    group = {
        "weights": weights,
        "input_activations": {"num_bits": 8, "strategy": inputs, "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


QUANTIZED = {
    "awq": (LLAMA, {"quant_method": "awq", "bits": 4, "group_size": 128}, GPU, 2, "recognises"),
    "bitsandbytes": (
        LLAMA,
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        GPU,
        2,
        "4 bits",
    ),
    "gptq native": (LLAMA, {"quant_method": "gptq", "bits": 4, "group_size": 128}, GPU, 1, "gptq"),
    "gptq on cpu": (LLAMA, {"quant_method": "gptq", "bits": 4}, CPU, 2, "not cpu"),
    "gptq not native": (GRANITE, {"quant_method": "gptq", "bits": 4}, GPU, 2, "static per-tensor"),
    "fp8 block native": (LLAMA, fp8(), GPU, 1, "per block"),
    "fp8 on cpu": (LLAMA, fp8(), CPU, 2, "on gpu, not cpu"),
    "fp8 other block": (LLAMA, fp8(weight_block_size=[64, 64]), GPU, 2, "weight_block_size"),
    "fp8 static block": (LLAMA, fp8(activation_scheme="static"), GPU, 2, "activation_scheme"),
    "fp8 block not native": (GRANITE, fp8(), GPU, 2, "static per-tensor"),
    "fp8 static tensor": (
        GRANITE,
        fp8(activation_scheme="static", weight_block_size=None),
        GPU,
        1,
        "static scales",
    ),
    "ct fp8 channel": (LLAMA, compressed(), GPU, 1, "per channel"),
    "ct fp8 group": (LLAMA, compressed("group"), GPU, 2, "accepts weight strategy"),
    "ct fp8 odd input": (LLAMA, compressed(inputs="group"), GPU, 2, "accepts input strategy"),
    "ct int4 group": (
        LLAMA,
        compressed("group", kind="int", bits=4, form="pack-quantized"),
        GPU,
        2,
        "group 128",
    ),
    "ct int8": (LLAMA, compressed(kind="int", form="int-quantized"), GPU, 2, "no weight encoding"),
    "mxfp4 native": (GPT_OSS, {"quant_method": "mxfp4"}, GPU, 1, "float4_e2m1fnx2"),
    "mxfp4 not native": (GRANITE, {"quant_method": "mxfp4"}, GPU, 2, "static per-tensor"),
    "nvfp4": (LLAMA, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, GPU, 1, "NVFP4"),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantization(tmp_path, name):
    config, quantization, device, code, words = QUANTIZED[name]
    config = {**LLAMA, **config, "quantization_config": quantization}
    folder = make_checkpoint(tmp_path / "m", config, llama_shapes())
    body = report("check-walls", folder, *device, code=code)
    (wall,) = [wall for wall in body["walls"] if wall["kind"] == "quantization"]
    assert words in wall["need"] + wall["lack"] + wall["fix"]
    assert wall["level"] == {1: "review", 2: "stop"}[code]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_plain_decoder_has_no_wall(tmp_path, device):
    body = report("check-walls", make_checkpoint(tmp_path / "m"), *device)
    assert body["verdict"] == "go on" and body["walls"] == []


def test_packed_weights_without_a_config(tmp_path):
    shapes = {**llama_shapes(), "lm_head.weight": ("F8_E4M3", [256, 64])}
    body = report("check-walls", make_checkpoint(tmp_path / "m", LLAMA, shapes), *GPU, code=2)
    assert "no quantization_config" in body["walls"][0]["lack"]


def test_modelopt_file_beside_the_config(tmp_path):
    folder = make_checkpoint(tmp_path / "m", {**LLAMA, **GRANITE}, llama_shapes())
    text = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(text))
    (wall,) = report("check-walls", folder, *GPU, code=2)["walls"]
    assert "modelopt NVFP4" in wall["need"]


def kinds(folder, *device, code):
    return [wall["kind"] for wall in report("check-walls", folder, *device, code=code)["walls"]]


def test_weight_formats(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert kinds(folder, *CPU, code=2) == ["weights"]
    (folder / "pytorch_model.bin").unlink()
    assert kinds(folder, *CPU, code=1) == ["weights"]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"model_type": "mine", "auto_map": {"AutoConfig": "c.C"}}, 1, "own Python code"),
        ({"model_type": "mine"}, 2, "does not know it"),
        ({"architectures": None}, 2, "no `architectures`"),
        (
            {
                "architectures": ["T5ForConditionalGeneration"],
                "model_type": "t5",
                "is_encoder_decoder": True,
            },
            2,
            "an encoder-decoder",
        ),
        ({"architectures": ["ViTModel"], "model_type": "vit"}, 2, "no causal decoder"),
    ],
)
def test_model_kinds(tmp_path, change, code, words):
    folder = make_checkpoint(tmp_path / "m", {**LLAMA, **change}, llama_shapes())
    body = report("check-walls", folder, *CPU, code=code)
    assert any(words in wall["need"] + wall["lack"] for wall in body["walls"])


STATE = {"backbone.layers.0.mixer.A_log": ("F32", [8, 4]), "backbone.norm.weight": ("F32", [4])}


def test_recurrent_state(tmp_path):
    own = {**LLAMA, "architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    folder = make_checkpoint(tmp_path / "own", own, STATE)
    (wall,) = report("check-walls", folder, *GPU, code=2)["walls"]
    assert wall["kind"] == "state" and "A_log" in wall["need"] and "nemotron_h" in wall["lack"]
    native = {**LLAMA, "architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    assert kinds(make_checkpoint(tmp_path / "native", native, STATE), *GPU, code=1) == ["state"]
    mixed = {**LLAMA, "layer_types": ["full_attention", "linear_attention"]}
    assert "state" in kinds(make_checkpoint(tmp_path / "mixed", mixed), *GPU, code=1)


def test_experts_and_latent_attention_need_a_gpu(tmp_path):
    shapes = {**llama_shapes(), "model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", [8, 8])}
    folder = make_checkpoint(tmp_path / "moe", LLAMA, shapes)
    assert kinds(folder, *CPU, code=1) == ["device"] and kinds(folder, *GPU, code=0) == []
    latent = make_checkpoint(tmp_path / "mla", {**LLAMA, "kv_lora_rank": 32})
    assert kinds(latent, *CPU, code=1) == ["device"] and kinds(latent, *GPU, code=0) == []


def test_tokenizers(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "m")
    auto_map = {"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(auto_map))
    (wall,) = report("check-walls", folder, *CPU, code=1)["walls"]
    assert wall["kind"] == "tokenizer" and "own tokenizer code" in wall["need"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (wall,) = report("check-walls", folder, *CPU, code=1)["walls"]
    assert "no tokenizer files" in wall["lack"]


def test_memory(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    size = report("check-walls", folder, *GPU)["estimate"]
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size["weights"] == pytest.approx(stored, rel=0.05)
    assert size["cache_per_token"] == 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, width, bytes
    on_cpu = report("check-walls", folder, *CPU)["estimate"]
    assert on_cpu["weights"] == 2 * size["weights"]

    def walls(gib, *more, code):
        device = ("--device", "gpu", "--device-memory", gib, *more)
        return report("check-walls", folder, *device, code=code)["walls"]

    half = size["weights"] / 2**31
    assert walls(half, code=2)[0]["level"] == "stop"
    assert "at least 2 devices" in walls(half * 1.2, "--devices", 2, code=1)[0]["fix"]
    tight = (size["weights"] + 100 * size["cache_per_token"]) / 2**30
    assert "--max-length 100" in walls(tight, code=1)[0]["fix"]


def test_text_report(tmp_path):
    folder = make_checkpoint(tmp_path / "m", {**LLAMA, "model_type": "mine"}, llama_shapes())
    done = run("check-walls", folder, *CPU)
    assert done.returncode == 2
    assert "STOP   code: needs the model type 'mine'" in done.stdout and "fix: " in done.stdout
    assert done.stdout.rstrip().endswith("on cpu")
