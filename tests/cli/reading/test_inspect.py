"""inspect, list-keys and list-archs: what they report, how fast, and what they never import."""

import json

import jsonschema
import pytest
from commands import cpu_seconds, heavy_imports, report, run, schema
from fake_checkpoints import LLAMA, make_checkpoint

from maxport.children import child_environment

LLAMA_70B = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
    "made_up_key": {"inner": [1, 2]},
}


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """An 80-layer checkpoint in 30 shards; the files are sparse."""
    return make_checkpoint(tmp_path_factory.mktemp("big") / "llama-70b", LLAMA_70B, shards=30)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("small") / "llama")


@pytest.mark.parametrize(
    "command",
    [("inspect",), ("list-keys",), ("list-keys", "--summary"), ("check-walls", "--device", "cpu")],
)
def test_80_layers_in_under_a_second_without_torch_or_max(big, command):
    run(command[0], big)  # MAX's sources are scanned once per version; this is that once
    assert heavy_imports(*command, big) == "[]"
    assert min(cpu_seconds(*command, big) for _ in range(2)) < 1


def test_list_archs_is_fast_and_light():
    run("list-archs")
    assert heavy_imports("list-archs", "--donors") == "[]"
    assert min(cpu_seconds("list-archs") for _ in range(2)) < 1


def test_inspect_says_who_reads_what(big):
    body = report("inspect", big)
    assert body["architecture"] == "LlamaForCausalLM" and body["known_to_transformers"]
    assert body["weights"]["tensors"] == 723 and body["weights"]["files"] == 30
    assert body["weights"]["dtypes"]["BF16"]["parameters"] == 70553706496
    assert {arch["name"]: arch["serve"] for arch in body["native"]} == {
        "LlamaForCausalLM": f"max serve --model {big}",
        "LlamaForCausalLM_ModuleV3": f"max serve --model {big} --prefer-module-v3",
    }
    assert body["read_by"] == "llama3_modulev3"
    rows = {row["key"]: row for row in body["keys"]}
    assert rows["rope_scaling.factor"]["value"] == 8.0
    assert any(read["into"] == "factor" for read in rows["rope_scaling.factor"]["reader"])
    assert any(read["into"] == "vocab_size" for read in rows["vocab_size"]["reader"])
    assert any("rope_theta" in read["into"] for read in rows["rope_theta"]["reader"])
    assert rows["made_up_key.inner"] == {
        "key": "made_up_key.inner",
        "value": [1, 2],
        "pipeline": [],
        "reader": [],
        "port": None,
        "hf": None,
    }
    assert any("model_config.py" in read["place"] for read in rows["architectures"]["pipeline"])


def test_inspect_places_are_real_lines(small):
    from maxport.plan.max_source import max_root

    architectures = max_root() / "pipelines" / "architectures"
    for row in report("inspect", small)["keys"]:
        for read in [*row["reader"], *row["pipeline"]]:
            file, line = read["place"].rsplit(":", 1)
            path = architectures / file
            path = path if path.is_file() else max_root() / file
            near = "\n".join(path.read_text().splitlines()[int(line) - 1 : int(line) + 3])
            assert read["key"].rsplit(".", 1)[-1] in near or "rope" in near or read["into"] in near


def test_inspect_against_a_donor(small):
    body = report("inspect", small, "--start-from", "olmo3")
    rows = {row["key"]: row["reader"] for row in body["keys"]}
    assert body["read_by"] == "olmo3" and rows["hidden_act"]
    assert not {r["key"]: r["reader"] for r in report("inspect", small)["keys"]}["hidden_act"]


def test_inspect_against_a_port(small, tmp_path):
    port = tmp_path / "port"
    port.mkdir()
    (port / "__init__.py").write_text("ARCHITECTURES = []\n")
    (port / "model_config.py").write_text(
        "class C:\n"
        "    def initialize(cls, huggingface_config: AutoConfig):\n"
        "        return C(width=huggingface_config.hidden_size,\n"
        "                 eps=getattr(huggingface_config, 'rms_norm_eps', 1e-6))\n"
    )
    rows = {r["key"]: r["port"] for r in report("inspect", small, "--port-dir", port)["keys"]}
    assert rows["hidden_size"][0] == {
        "key": "hidden_size",
        "into": "width",
        "place": "model_config.py:3",
    }
    assert rows["rms_norm_eps"][0]["into"] == "eps" and rows["vocab_size"] == []


def test_inspect_a_model_max_does_not_have(tmp_path):
    config = {**LLAMA, "architectures": ["HeliumForCausalLM"], "model_type": "helium"}
    folder = make_checkpoint(tmp_path / "m", config)
    body = report("inspect", folder)
    assert body["native"] == [] and body["read_by"] is None
    assert all(row["reader"] is None for row in body["keys"])
    assert "does not have this architecture" in run("inspect", folder).stdout


def test_inspect_maps_a_models_own_names(tmp_path):
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64}
    folder = make_checkpoint(tmp_path / "m", config, shapes={"wte.weight": ("F32", [8, 64])})
    rows = {
        r["key"]: r for r in report("inspect", folder, "--start-from", "llama3_modulev3")["keys"]
    }
    assert any(read["key"] == "hidden_size" for read in rows["n_embd"]["reader"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--start-from", "olmo9"), "no architecture folder 'olmo9'"),
        (("--port-dir", "/none"), "no port directory"),
    ],
)
def test_inspect_bad_options(small, arguments, message):
    done = run("inspect", small, *arguments)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.slow
def test_measured_reads_of_the_reference(small):
    body = report("inspect", small, "--measure")
    hf = {row["key"]: row["hf"] for row in body["keys"]}
    assert body["forward"] == "a forward pass of 8 tokens"
    assert hf["hidden_act"][0].startswith("models/llama/modeling_llama.py:")
    assert hf["rope_theta"] and hf["tie_word_embeddings"]
    assert hf["architectures"] == []


def test_list_keys(big):
    body = report("list-keys", big)
    assert body["tensors"] == len(body["keys"]) == 723 and body["left_off"] == 0
    assert body["bytes"] == sum(key["end"] - key["start"] for key in body["keys"])
    limited = report("list-keys", big, "--prefix", "model.layers.3.", "--limit", 4)
    assert limited["tensors"] == 9 and len(limited["keys"]) == 4 and limited["left_off"] == 5


def test_list_keys_summary(big):
    body = report("list-keys", big, "--summary")
    rows = {row["pattern"]: row for row in body["patterns"]}
    assert len(rows) == 12
    assert rows["model.layers.*.self_attn.k_proj.weight"] == {
        "pattern": "model.layers.*.self_attn.k_proj.weight",
        "count": 80,
        "dtypes": ["BF16"],
        "shapes": [[1024, 8192]],
        "nbytes": 80 * 1024 * 8192 * 2,
        "indices": "0-79",
    }
    text = run("list-keys", big, "--summary").stdout
    assert "80 x BF16" in text and "[0-79]" in text and "723 tensors, 141.1 GB" in text


def test_summary_shows_a_missing_layer_and_mixed_shapes(tmp_path):
    shapes = {f"h.{i}.w": ("F32" if i else "BF16", [4, 4 + i]) for i in (0, 1, 3)}
    folder = make_checkpoint(tmp_path / "m", shapes=shapes)
    (row,) = report("list-keys", folder, "--summary")["patterns"]
    assert row["indices"] == "0-1,3" and sorted(row["dtypes"]) == ["BF16", "F32"]
    assert sorted(row["shapes"]) == [[4, 4], [4, 5], [4, 7]]


def test_list_archs():
    body = report("list-archs")
    archs = {arch["name"]: arch for arch in body["architectures"] if not arch["speculates_on"]}
    llama = archs["LlamaForCausalLM_ModuleV3"]
    assert (llama["slug"], llama["lane"], llama["donor"]) == ("llama3_modulev3", "v3", True)
    assert llama["encodings"] == ["bfloat16", "float32"]
    assert archs["Olmo3ForCausalLM"]["lane"] == "v3" and archs["OlmoForCausalLM"]["lane"] == "v2"
    assert archs["BertModel"]["donor"] is False
    v3 = report("list-archs", "--lane", "v3", "--donors")["architectures"]
    assert v3 and all(a["lane"] == "v3" and a["donor"] for a in v3)
    match = report("list-archs", "--match", "qwen3forcausallm")["architectures"]
    assert {a["slug"] for a in match} >= {"qwen3", "qwen3_embedding"}


def test_list_archs_without_a_match_exits_1():
    done = run("list-archs", "--match", "HeliumForCausalLM")
    assert done.returncode == 1 and "registers no architecture" in done.stderr


@pytest.mark.slow
def test_list_archs_agrees_with_max_itself():
    """Import MAX and compare what the source scan says of every architecture it can import."""
    import subprocess
    import sys

    code = """
import importlib, json
from maxport.plan.native import native_archs
from max.pipelines.lib.arch_lookup import SupportedArchitecture
wrong, derived, checked = [], [], 0
for arch in native_archs():
    try:
        package = importlib.import_module("max.pipelines.architectures." + arch.slug)
    except ImportError:
        continue
    real = getattr(package, arch.symbol)
    if arch.speculates_on or not isinstance(real, SupportedArchitecture):
        continue
    if not arch.encodings:  # MAX computes it from the target it speculates for
        derived.append(arch.name)
        continue
    checked += 1
    model = real.pipeline_model
    said = (arch.name, arch.task, arch.encodings[:1], set(arch.encodings), arch.multi_gpu)
    true = (real.name, real.task.name.lower(), (real.default_encoding,))
    true += (set(real.supported_encodings), real.multi_gpu_supported)
    if said != true or arch.model_class != model.__name__:
        wrong.append([str(said), str(true), arch.model_class, model.__name__])
    v3 = any("ModuleV3" in base.__name__ for base in model.__mro__)
    if v3 and arch.lane != "v3":
        wrong.append([arch.name, arch.lane])
print(json.dumps([checked, derived, wrong]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=child_environment(),
    )
    checked, derived, wrong = json.loads(done.stdout.splitlines()[-1])
    assert checked > 100 and len(derived) <= 2 and wrong == []


@pytest.mark.parametrize("command", ["inspect", "list-keys", "check-walls"])
@pytest.mark.parametrize("model", ["/no/such/folder", "no space allowed", "team/model"])
def test_bad_model_gives_one_json_error(command, model):
    done = run(command, model, "--json")
    assert done.returncode == 2
    jsonschema.validate(json.loads(done.stdout), schema("error"))


@pytest.mark.parametrize("command", ["inspect", "list-keys", "check-walls", "list-archs"])
def test_help_shows_an_example(command):
    done = run(command, "--help")
    assert done.returncode == 0 and f"Example: maxport {command}" in done.stdout
