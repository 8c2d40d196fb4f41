"""The files around the graph: the hand-written Helium port, and every kind of weight rule."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helium_spec import FIXTURE, HELIUM

from maxport.emit.shell import render_shell
from maxport.emit.spec import ConfigField, Drop, Fuse, PortSpec, Rename, Tie, Transpose
from maxport.emit.write import write_port
from maxport.errors import MaxportError


def emitted(spec: PortSpec, folder: Path) -> Path:
    files = render_shell(spec) | {f"{spec.slug}.py": (FIXTURE / "helium.py").read_text()}
    return write_port(folder, spec.slug, files)


def adapter(spec: PortSpec, folder: Path) -> ModuleType:
    """The emitted weight_adapters.py, imported by itself."""
    path = emitted(spec, folder) / "weight_adapters.py"
    module_spec = importlib.util.spec_from_file_location("weight_adapters", path)
    assert module_spec and module_spec.loader
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def with_rules(*rules: object, parameters: tuple[str, ...]) -> PortSpec:
    fields = tuple(f for f in HELIUM.config_fields if f.name == "tie_word_embeddings")
    return dataclasses.replace(
        HELIUM, weight_rules=rules, parameters=parameters, config_fields=fields
    )


class Entry:
    """A checkpoint's weight as MAX's adapters get it: `data()` is the tensor."""

    def __init__(self, weight: object) -> None:
        self.weight = weight

    def data(self) -> object:
        return self.weight


def weights(**arrays: np.ndarray) -> dict:
    """Weights as MAX's adapters get them."""
    from max.graph.weights import WeightData

    return {name: Entry(WeightData.from_numpy(array, name)) for name, array in arrays.items()}


def arrays(state: dict) -> dict[str, np.ndarray]:
    return {name: weight.to_buffer().to_numpy() for name, weight in state.items()}


def same_after_second_run(module: ModuleType, state: dict) -> dict[str, np.ndarray]:
    """The adapter's result, after checking that running it again changes nothing."""
    once = module.convert_safetensor_state_dict(state)
    again = {name: Entry(weight) for name, weight in once.items()}
    for twice in (again, once):  # as checkpoint entries, and as they are
        result = module.convert_safetensor_state_dict(twice)
        assert list(once) == list(result)
        for name, array in arrays(once).items():
            np.testing.assert_array_equal(array, arrays(result)[name])
    return arrays(once)


def test_helium_spec_gives_the_hand_written_files(tmp_path: Path) -> None:
    port = emitted(HELIUM, tmp_path)
    for file in FIXTURE.glob("*.py"):
        assert (port / file.name).read_text() == file.read_text(), file.name


def test_fused_parts_are_joined_in_order_along_their_axis(tmp_path: Path) -> None:
    spec = with_rules(
        Fuse(("l.{i}.q", "l.{i}.k"), "l.{i}.qk"),
        Fuse(("a", "b"), "ab", axis=1),
        parameters=("l.{i}.qk", "ab"),
    )
    q, k = np.ones((3, 2), np.float32), np.zeros((1, 2), np.float32)
    a, b = np.ones((2, 1), np.float32), np.zeros((2, 3), np.float32)
    entries = weights(**{"l.11.k": k, "b": b, "l.11.q": q, "a": a})
    result = same_after_second_run(adapter(spec, tmp_path), entries)
    np.testing.assert_array_equal(result["l.11.qk"], np.concatenate([q, k]))
    np.testing.assert_array_equal(result["ab"], np.concatenate([a, b], axis=1))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    spec = with_rules(Fuse(("l.{i}.q", "l.{i}.k"), "l.{i}.qk"), parameters=("l.{i}.qk",))
    module = adapter(spec, tmp_path)
    with pytest.raises(ValueError, match=r"the checkpoint lacks l\.7\.k"):
        module.convert_safetensor_state_dict(weights(**{"l.7.q": np.ones((2, 2), np.float32)}))


def test_transposed_weights_are_swapped_once_even_under_the_same_name(tmp_path: Path) -> None:
    spec = with_rules(Transpose("l.{i}.w"), parameters=("l.{i}.w",))
    stored = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = same_after_second_run(adapter(spec, tmp_path), weights(**{"l.0.w": stored}))
    np.testing.assert_array_equal(result["l.0.w"], stored.T)


def test_renames_take_the_first_prefix_that_fits(tmp_path: Path) -> None:
    spec = with_rules(
        Rename("h.{i}.attn.c_proj.", "layers.{i}.o."),
        Rename("h.{i}.", "layers.{i}."),
        parameters=("layers.{i}.o.weight", "layers.{i}.ln.weight"),
    )
    one = np.ones(2, np.float32)
    entries = weights(**{"h.12.attn.c_proj.weight": one, "h.12.ln.weight": one})
    result = same_after_second_run(adapter(spec, tmp_path), entries)
    assert set(result) == {"layers.12.o.weight", "layers.12.ln.weight"}


def test_dropped_tensors_go_and_unknown_ones_are_named(tmp_path: Path) -> None:
    why = "a buffer that every layer of the graph computes itself from the configuration, " * 2
    spec = with_rules(Drop("l.{i}.inv_freq", why), parameters=("w",))
    module = adapter(spec, tmp_path)
    one = np.ones(2, np.float32)
    assert set(same_after_second_run(module, weights(**{"l.3.inv_freq": one, "w": one}))) == {"w"}
    with pytest.raises(ValueError, match=r"'l\.3\.surprise' has no place"):
        module.convert_safetensor_state_dict(weights(**{"l.3.surprise": one}))


def test_a_head_that_copies_the_embedding_is_stored_once(tmp_path: Path) -> None:
    spec = with_rules(Tie("head", "embed"), parameters=("head", "embed"))
    module = adapter(spec, tmp_path)
    embed, other = np.ones((3, 2), np.float32), np.full((3, 2), 2, np.float32)
    copied = weights(head=embed.copy(), embed=embed)
    assert set(same_after_second_run(module, copied)) == {"embed"}
    own = weights(head=other, embed=embed)
    assert set(same_after_second_run(module, own)) == {"head", "embed"}
    assert set(same_after_second_run(module, weights(embed=embed))) == {"embed"}


def test_bfloat16_is_fused_and_transposed_bit_by_bit(tmp_path: Path) -> None:
    import torch
    from max.graph.weights import load_weights
    from safetensors.torch import save_file

    a, b = torch.randn(3, 4).bfloat16(), torch.randn(3, 2).bfloat16()
    save_file({"a": a, "b": b}, tmp_path / "x.safetensors")
    spec = with_rules(Transpose("a"), Transpose("b"), Fuse(("a", "b"), "ab"), parameters=("ab",))
    state = dict(load_weights([tmp_path / "x.safetensors"]).items())
    fused = adapter(spec, tmp_path / "out").convert_safetensor_state_dict(state)["ab"]
    assert torch.equal(torch.from_dlpack(fused.to_buffer()), torch.cat([a.T, b.T]))


BAD = {
    "not a Python identifier": {"slug": "my-model"},
    "defined twice": {"config_fields": (ConfigField("dtype", "str", "hf.dtype", "Dtype."),)},
    "not a Python expression": {"config_fields": (ConfigField("a", "int", "hf.", "A."),)},
    "needs a config field": {"config_fields": ()},
    "is no parameter": {"weight_rules": (Fuse(("a", "b"), "nowhere"),)},
    "or its embedding is no parameter": {"weight_rules": (Tie("no_head", "model.norm.weight"),)},
    "variable other than": {"parameters": ("l.{i}.e.{j}.w",), "weight_rules": ()},
}


@pytest.mark.parametrize("message", BAD)
def test_a_spec_that_contradicts_itself_is_refused(message: str) -> None:
    with pytest.raises(MaxportError, match=message):
        render_shell(dataclasses.replace(HELIUM, **BAD[message]))


def test_models_without_position_bound_or_with_nested_config(tmp_path: Path) -> None:
    nested = dataclasses.replace(HELIUM, text_config="text_config", slug="nested")
    source = (emitted(nested, tmp_path) / "model_config.py").read_text()
    assert source.count("hf = huggingface_config.text_config") == 2
    assert "hf = hf_config.text_config" in source
    unbound = dataclasses.replace(HELIUM, max_length=None, slug="unbound")
    source = (emitted(unbound, tmp_path) / "model_config.py").read_text()
    assert "pass --max-length" in source and "max_position_embeddings" not in source
