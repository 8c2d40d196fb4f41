"""Fingerprints and edit scripts: what makes a donor near, and what a delta says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from maxport.plan.compare import compare, describe
from maxport.plan.donors import SHIPPED, donor_print, donors, measure, rank, versions
from maxport.plan.fingerprint import Fingerprint, Kind, fingerprint, from_json, to_json
from maxport.plan.slots import Token
from maxport.plan.source import source_lines

transformers.logging.set_verbosity_error()


def kind(**slots: list[Token]) -> Kind:
    return Kind("layer kind 1", {k.replace("_", " "): tuple(v) for k, v in slots.items()})


def model(*kinds: Kind, outer: Kind | None = None, weights: tuple[str, ...] = ()) -> Fingerprint:
    return Fingerprint("M", kinds, outer or Kind("outside the layers", {}), weights)


LINEAR = Token("linear", (), "Linear modeling_a.py:1")
NORM = Token("rms_norm", (("weight", True),), "Norm modeling_a.py:2")
PLUS_ONE = Token("rms_norm", (("weight", True), ("weight + 1", True)), "Norm modeling_b.py:9")


def test_equal_structures_have_distance_zero_whatever_their_places() -> None:
    a = model(kind(query=[LINEAR, NORM]))
    b = model(kind(query=[Token("linear", (), "Other x.py:7"), NORM]))
    found = compare(a, b)
    assert (found.distance, found.shared, found.deltas) == (0, 1.0, ())


def test_an_extra_norm_is_one_delta_that_says_where_and_what() -> None:
    found = compare(model(kind(query=[LINEAR, PLUS_ONE])), model(kind(query=[LINEAR])))
    assert len(found.deltas) == 1
    delta = found.deltas[0]
    assert delta.component == "query" and delta.donor == "nothing"
    assert delta.change == "add RMSNorm (weight, weight + 1) after the projection"
    assert delta.reference == "Norm modeling_b.py:9"


def test_a_changed_attribute_is_named_and_cheaper_than_a_new_operation() -> None:
    changed = compare(model(kind(norm=[PLUS_ONE])), model(kind(norm=[NORM])))
    added = compare(model(kind(norm=[PLUS_ONE])), model(kind(norm=[])))
    assert changed.deltas[0].change == "RMSNorm: weight + 1: no -> yes"
    assert 0 < changed.distance < added.distance
    removed = compare(model(kind(norm=[])), model(kind(norm=[NORM])))
    assert removed.deltas[0].change == "remove RMSNorm (weight)"
    assert 0 < removed.distance < added.distance


def test_a_difference_shared_by_all_kinds_counts_once() -> None:
    window = Token("attend", (("mask", "sliding"),))
    causal = Token("attend", (("mask", "causal"),))
    two = model(
        Kind("layer kind 1", {"query": (LINEAR, NORM), "scores": (window,)}),
        Kind("layer kind 2", {"query": (LINEAR, NORM), "scores": (causal,)}),
    )
    donor = model(Kind("layer kind 1", {"query": (LINEAR,), "scores": (causal,)}))
    deltas = {d.component: d for d in compare(two, donor).deltas}
    assert set(deltas) == {"query", "scores"}
    assert deltas["query"].kinds == ()
    assert deltas["scores"].kinds == ("layer kind 1",)


def test_a_kind_of_layer_that_only_the_donor_has_is_a_small_delta() -> None:
    one = Kind("layer kind 1", {"mlp wiring": (), "query": (LINEAR,)})
    other = Kind("layer kind 2", {"experts wiring": (), "query": (NORM,)})
    found = compare(model(one), model(one, other))
    assert [(d.component, d.donor) for d in found.deltas] == [("layers", "layers of experts")]
    assert 0 < found.distance < 1


def test_the_source_named_is_the_models_even_after_another_comparison() -> None:
    first = Token("rope", (("pairs", "adjacent"),), "A a.py:1")
    second = Token("rope", (("pairs", "adjacent"),), "B b.py:2")
    donor = model(kind(query=[Token("rope", (("pairs", "halves"),))]))
    references = [
        compare(model(kind(query=[t])), donor).deltas[0].reference for t in (first, second)
    ]
    assert references == ["A a.py:1", "B b.py:2"]


def test_words_for_tokens() -> None:
    assert describe(None) == "nothing"
    assert describe(Token("rope", (("pairs", "adjacent"),))) == "rotary embedding (pairs adjacent)"


def traced(model_type: str, **fields: Any) -> Fingerprint:
    return fingerprint(transformers.AutoConfig.for_model(model_type, **fields))


@pytest.fixture(scope="module")
def llama() -> Fingerprint:
    return traced("llama", num_key_value_heads=8, hidden_size=4096, num_hidden_layers=80)


def test_a_llama_is_its_slots(llama: Fingerprint) -> None:
    assert len(llama.kinds) == 1 and llama.kinds[0].layers == 2
    slots = {name: [t.op for t in tokens] for name, tokens in llama.kinds[0].slots.items()}
    assert slots["attention query"] == ["linear", "rope"]
    assert slots["attention value"] == ["linear"]
    assert slots["attention scores"] == ["attend"]
    assert sorted(slots["mlp body"]) == ["activation", "gate", "linear", "linear", "linear"]
    assert [t.op for t in llama.outer.slots["head"]] == ["rms_norm", "linear"]
    assert "model.layers.*.mlp.up_proj.weight" in llama.weights


def test_fingerprints_survive_json(llama: Fingerprint) -> None:
    assert from_json(json.loads(json.dumps(to_json(llama)))) == llama


def test_sizes_do_not_show_but_biases_do(llama: Fingerprint) -> None:
    other = traced("llama", hidden_size=2048, num_attention_heads=16, num_key_value_heads=4)
    assert compare(other, llama).distance == 0
    biased = compare(traced("llama", attention_bias=True, num_key_value_heads=8), llama)
    changes = {d.component: d.change for d in biased.deltas}
    assert changes["attention query"] == "projection: bias: no -> yes"
    assert changes["attention output"] == "projection: bias: no -> yes"
    assert set(changes) == {f"attention {p}" for p in ("query", "key", "value", "output")}


def test_the_deltas_of_qwen3_from_llama_are_its_query_and_key_norms(llama: Fingerprint) -> None:
    found = compare(traced("qwen3"), llama)
    assert {d.component for d in found.deltas} == {"attention query", "attention key"}
    for delta in found.deltas:
        assert "add RMSNorm" in delta.change and "over each head" in delta.change
        assert "modeling_qwen3.py" in delta.reference


def test_the_table_that_ships_was_measured_with_these_versions() -> None:
    stored = json.loads(SHIPPED.read_text())
    assert stored["versions"] == versions(), "run: python bench/donors.py --prints"
    assert set(stored["prints"]) == {d.model_type for d in donors()}
    # One of them measured again: the table is neither edited by hand nor stale.
    fresh = from_json(measure("olmo2"))
    kept = from_json(stored["prints"]["olmo2"])
    assert compare(fresh, kept).deltas == compare(kept, fresh).deltas == ()
    assert fresh.weights == kept.weights


def test_a_class_that_max_has_ranks_first_and_without_it_its_family(llama: Fingerprint) -> None:
    assert {r.donor.arch.class_name for r in rank(llama)[:2]} == {"LlamaForCausalLM"}
    assert rank(llama)[0].donor.arch.lane == "v3"
    assert all(r.donor.arch.lane == "v2" for r in rank(llama, lane="v2"))
    without = rank(llama, without=["LlamaForCausalLM"])
    assert without[0].donor.arch.class_name != "LlamaForCausalLM"
    order = [(r.comparison.distance > 0, r.score) for r in without]
    assert order == sorted(order)


def test_a_renamed_model_ranks_the_same(llama: Fingerprint, tmp_path: Path) -> None:
    """Names decide nothing: only the tie-break on weight names may see them."""
    text = (Path(transformers.__file__).parent / llama.file).read_text("utf-8")
    copy = tmp_path / "modeling_strange.py"
    copy.write_text(text.replace("Llama", "Strange"))
    names = {"model": "StrangeForCausalLM", "file": str(copy), "weights": ("a.*.b",)}
    renamed = dataclasses.replace(llama, **names)
    before = [(r.donor.arch.class_name, r.score) for r in rank(llama)]
    after = [(r.donor.arch.class_name, r.score) for r in rank(renamed)]
    assert sorted(before) == sorted(after)


def test_the_source_decides_between_structures_that_are_as_near(llama: Fingerprint) -> None:
    unread = dataclasses.replace(llama, file="nowhere.py")
    assert {r.likeness for r in rank(unread)} == {None}
    alike = {r.donor.arch.class_name: r.likeness for r in rank(llama)}
    assert alike["LlamaForCausalLM"] == 1.0
    assert alike["MistralForCausalLM"] > alike["DeepseekV3ForCausalLM"] > 0


def test_source_lines_leave_out_names_docstrings_and_what_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        'class FooNorm:\n    """Foo."""\n    eps = 1\n\nclass FooOther:\n    x = 2\n\n'
        "class FooForCausalLM:\n    # a comment\n    norm = FooNorm\n"
    )
    found = source_lines(str(file), "FooForCausalLM")
    assert set(found) == {"class *Norm:", "eps = 1", "class *ForCausalLM:", "norm = *Norm"}
    assert source_lines(str(file), "Absent") == source_lines("nowhere", "X") == {}


def test_a_norm_shared_by_two_branches_and_a_parallel_residual() -> None:
    found = {d.component: d.change for d in compare(traced("cohere"), traced("llama")).deltas}
    assert "by the same norm as another branch" in found["mlp norm before"]
    assert found["mlp wiring"] == (
        "residual branch: reads: sum 1 -> the layer's input; adds to: sum 1 -> the layer's input"
    )
    assert found["attention query"].endswith("in float32: no -> yes")


def test_frequencies_that_differ_by_kind_and_formulas_of_one_module() -> None:
    gemma = {d.change for d in compare(traced("gemma2"), traced("gemma3_text")).deltas}
    assert "rotary embedding: frequencies by kind of layer: yes -> no" in gemma
    xielu = [d for d in compare(traced("apertus"), traced("llama")).deltas if "form" in d.change]
    assert len(xielu) == 1 and "XIELUActivation" in xielu[0].reference
    assert "expm1" in xielu[0].change and "after the" in xielu[0].change


def test_donors_are_decoders_that_transformers_has() -> None:
    names = {d.arch.class_name for d in donors()}
    assert {"LlamaForCausalLM", "Olmo2ForCausalLM", "GptOssForCausalLM"} <= names
    assert all(d.arch.donor for d in donors())
    assert donor_print("llama") is not None
