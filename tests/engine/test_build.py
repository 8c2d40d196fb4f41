"""Building ports and MAX's own graphs, and running them step by step by evaluation."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from maxport.children import child_environment
from maxport.engine import registry
from maxport.engine.build import UNBOUNDED_LENGTH, BuiltGraph, build_native, build_port
from maxport.engine.runner import EvaluatedRunner
from maxport.errors import MaxportError

LENGTHS = (5, 150, 29)


def prompts(vocab: int, seed: int = 0) -> dict[int, list[int]]:
    rng = np.random.default_rng(seed)
    return {index: rng.integers(3, vocab, n).tolist() for index, n in enumerate(LENGTHS)}


def reference(folder: Path, sequences: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return {k: model(torch.tensor([s])).logits[0].numpy() for k, s in sequences.items()}


def assert_equal(found: Mapping[int, np.ndarray], expected: Mapping[int, np.ndarray]) -> None:
    width = max(float(rows.max() - rows.min()) for rows in expected.values())
    for key, rows in expected.items():
        assert found[key].shape == rows.shape
        assert float(np.abs(found[key] - rows).max()) <= 2e-5 * width


@pytest.fixture(scope="module")
def built(llama: Path, helium: Path, helium_port: Path) -> dict[str, tuple[BuiltGraph, Path]]:
    return {
        "v2": (build_native("LlamaForCausalLM", llama, lane="v2"), llama),
        "v3": (build_native("LlamaForCausalLM", llama, lane="v3"), llama),
        "port": (build_port(helium_port, helium), helium),
    }


@pytest.mark.parametrize("which", ["v2", "v3", "port"])
def test_logits_of_a_ragged_batch_and_of_chunks_are_hugging_faces(
    built: dict[str, tuple[BuiltGraph, Path]], which: str
) -> None:
    graph, folder = built[which]
    sequences = prompts(graph.vocab_size)
    expected = reference(folder, sequences)
    runner = EvaluatedRunner(graph)
    assert_equal(runner.step(sequences), expected)
    runner.reset()
    parts: dict[int, list[np.ndarray]] = {key: [] for key in sequences}
    for begin in range(0, 150, 47):
        chunk = {k: s[begin : begin + 47] for k, s in sequences.items() if len(s) > begin}
        for key, rows in runner.step(chunk).items():
            parts[key].append(rows)
    assert_equal({k: np.concatenate(rows) for k, rows in parts.items()}, expected)


def test_requests_may_join_and_pause_between_steps(
    built: dict[str, tuple[BuiltGraph, Path]],
) -> None:
    graph, folder = built["port"]
    sequences = prompts(graph.vocab_size, seed=1)
    expected = reference(folder, sequences)
    runner = EvaluatedRunner(graph)
    first = runner.step({1: sequences[1][:100]})[1]
    runner.step({0: sequences[0], 2: sequences[2]})
    second = runner.step({1: sequences[1][100:]})[1]
    assert_equal({1: np.concatenate([first, second])}, {1: expected[1]})


def test_inputs_come_in_each_lanes_own_order(
    built: dict[str, tuple[BuiltGraph, Path]],
) -> None:
    orders = {which: [role.name for role in built[which][0].roles[:3]] for which in built}
    assert orders["v2"] == ["tokens", "row_offsets", "return_n_logits"]
    assert orders["v3"] == orders["port"] == ["tokens", "return_n_logits", "row_offsets"]
    assert [built[which][0].lane for which in built] == ["v2", "v3", "v3"]


def test_variable_mode_returns_the_last_n_rows(helium: Path, helium_port: Path) -> None:
    graph = build_port(helium_port, helium, return_logits="variable")
    sequences = prompts(graph.vocab_size)
    expected = reference(helium, sequences)
    out = EvaluatedRunner(graph).outputs(sequences, return_n_logits=3)
    assert out.named["logit_offsets"].tolist() == [0, 3, 6, 9]
    last = {0: out.named["logits"]}
    assert_equal(last, {0: np.concatenate([rows[-3:] for rows in expected.values()])})


def test_a_graph_for_a_gpu_builds_without_one(helium: Path, helium_port: Path) -> None:
    import subprocess

    # In a process of its own: simulating GPUs cannot be undone within one.
    code = (
        "import sys; from pathlib import Path\n"
        "from maxport.engine.build import build_port\n"
        "g = build_port(Path(sys.argv[1]), Path(sys.argv[2]), device='gpu', encoding='bfloat16')\n"
        "from maxport.engine.runner import EvaluatedRunner\n"
        "rows = EvaluatedRunner(g).step({0: [3, 4, 5], 1: [6]})\n"
        "print(rows[0].shape, rows[1].shape, g.roles[0].on_host)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(helium_port), str(helium)],
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(),
    )
    assert done.stdout.split("\n")[0] == "(3, 97) (1, 97) False", done.stderr[-2000:]


def test_the_cache_says_when_it_is_full(built: dict[str, tuple[BuiltGraph, Path]]) -> None:
    runner = EvaluatedRunner(built["port"][0], capacity=128)
    with pytest.raises(MaxportError, match="cache is full"):
        runner.step({0: [5] * 128 * 20})


def test_a_step_without_tokens_is_refused(built: dict[str, tuple[BuiltGraph, Path]]) -> None:
    with pytest.raises(MaxportError, match="sequence 7 gets no token"):
        EvaluatedRunner(built["port"][0]).step({7: []})


def test_two_ports_of_one_name_load_in_turn(
    helium: Path, helium_port: Path, tmp_path: Path
) -> None:
    other = tmp_path / "helium"
    shutil.copytree(helium_port, other)
    config = other / "model_config.py"
    config.chmod(0o644)
    config.write_text(config.read_text().replace("hf.rms_norm_eps", "hf.rms_norm_eps * 2"))
    tokens = {0: [5, 6, 7, 8]}
    mine = EvaluatedRunner(build_port(helium_port, helium)).step(tokens)[0]
    changed = EvaluatedRunner(build_port(other, helium)).step(tokens)[0]
    again = EvaluatedRunner(build_port(helium_port, helium)).step(tokens)[0]
    assert np.abs(mine - changed).max() > 1e-3
    assert np.array_equal(mine, again)
    assert "helium" not in sys.modules
    assert not list(other.rglob("__pycache__"))


def test_native_lookups_survive_a_port_of_the_same_class(
    llama: Path, helium: Path, helium_port: Path
) -> None:
    build_port(helium_port, helium)
    with pytest.raises(MaxportError, match="registers no HeliumForCausalLM"):
        build_native("HeliumForCausalLM", helium, lane="v2")


def test_a_lane_that_max_lacks_names_the_other_one() -> None:
    with pytest.raises(MaxportError, match="--native v2"):
        registry.native_architecture("Qwen2ForCausalLM", "v3")


def test_a_max_outside_the_pin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed_max", lambda: "26.9.0")
    with pytest.raises(MaxportError, match=r"MAX 26.9.0 is installed, maxport works with MAX >=26"):
        registry.check_max_version()
    monkeypatch.setattr(registry, "installed_max", lambda: None)
    with pytest.raises(MaxportError, match="MAX is not installed"):
        registry.check_max_version()


def test_broken_port_directories_are_explained(
    helium: Path, llama: Path, helium_port: Path, tmp_path: Path
) -> None:
    with pytest.raises(MaxportError, match="not a port directory"):
        build_port(tmp_path, helium)
    for name, text, message in (
        ("syntax", "def broken(:\n", "the port does not import: SyntaxError"),
        ("bare", "x = 1\n", "exposes no ARCHITECTURES"),
        ("json", "ARCHITECTURES = [1]\n", "taken by another"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(text)
        with pytest.raises(MaxportError, match=message):
            build_port(folder, helium)
    with pytest.raises(MaxportError, match="the port is for HeliumForCausalLM"):
        build_port(helium_port, llama)


def test_a_checkpoint_that_max_refuses_is_an_error_with_its_words(
    helium: Path, helium_port: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "checkpoint"
    shutil.copytree(helium, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MaxportError, match=r"does not build: KeyError.*model\.norm\.weight"):
        build_port(helium_port, folder)


def test_a_model_without_a_longest_length_is_built_for_one(
    helium: Path, helium_port: Path, tmp_path: Path
) -> None:
    port = Path(shutil.copytree(helium_port, tmp_path / "boundless"))
    bound = (
        "\n    @classmethod\n"
        "    def calculate_max_seq_len(cls, huggingface_config, model_config):\n"
        "        if model_config.max_length is None:\n"
        "            raise ValueError('pass --max-length')\n"
        "        return model_config.max_length\n"
    )
    text = (port / "model_config.py").read_text()
    head, mark, tail = text.partition("    vocab_size: int\n")
    (port / "model_config.py").write_text(head + bound + "\n" + mark + tail)
    assert build_port(port, helium).max_length == UNBOUNDED_LENGTH
    assert build_port(port, helium, max_length=300).max_length == 300


def test_casts_in_weight_adapters_are_done_without_a_device() -> None:
    """MAX leaves them undone where GPUs are virtual; a router's weights were zero then."""
    import torch
    from max.dtype import DType
    from max.graph.weights import WeightData

    from maxport.engine.evaluator.dtypes import to_torch
    from maxport.engine.staging import cast_weight

    values = np.array([[1.0, -2.5, 1.00390625], [3e38, 0.0, 7.0]], np.float32)
    weight = WeightData.from_numpy(values, "gate")
    half = cast_weight(weight, DType.bfloat16)
    assert (half.name, half.dtype, list(half.shape)) == ("gate", DType.bfloat16, [2, 3])
    assert torch.equal(to_torch(half), torch.from_numpy(values).bfloat16())
    back = cast_weight(half, DType.float32)
    assert torch.equal(to_torch(back), torch.from_numpy(values).bfloat16().float())
    assert cast_weight(weight, DType.float32) is weight
    small = cast_weight(weight, DType.float8_e4m3fn)
    assert to_torch(small).dtype == torch.float8_e4m3fn
