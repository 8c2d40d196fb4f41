"""Numbers tied to the configuration: the simplest expression that fits every size."""

from __future__ import annotations

import itertools

import pytest

from maxport.emit.expr import FieldSource, Lifter
from maxport.errors import MaxportError

SIZES = {
    "hidden_size": (96, 160, 224),
    "num_attention_heads": (6, 8, 12),
    "num_key_value_heads": (2, 4, 3),
    "head_dim": (20, 24, 16),
    "intermediate_size": (136, 216, 304),
    "vocab_size": (211, 307, 401),
}
FLOATS = {"rms_norm_eps": (0.004, 0.007, 0.0021), "partial_rotary_factor": (0.6, 0.75, 0.5)}
FIELDS = [FieldSource(n, f"hf.{n}", v, "int") for n, v in SIZES.items()] + [
    FieldSource(n, f"hf.{n}", v, "float") for n, v in FLOATS.items()
]


def value(text: str, size: int) -> float:
    names = {n: v[size] for n, v in {**SIZES, **FLOATS}.items()}
    return eval(text.replace("config.", ""), {}, names)


@pytest.mark.parametrize(
    "text",
    [
        "hidden_size",
        "4 * hidden_size",
        "head_dim * num_attention_heads",
        "num_attention_heads // num_key_value_heads",
        "(num_attention_heads + 2 * num_key_value_heads) * head_dim",
        "int(head_dim * partial_rotary_factor)",
        "head_dim ** -0.5",
        "hidden_size ** 0.5",
        "rms_norm_eps",
    ],
)
def test_the_expression_behind_a_number_is_found_and_holds_at_a_third_size(text: str) -> None:
    found = Lifter(FIELDS).lift((value(text, 0), value(text, 1)), "here")
    assert value(str(found), 2) == pytest.approx(value(text, 2))


def test_a_number_that_never_changes_stays_a_number() -> None:
    assert Lifter(FIELDS).lift((3, 3), "here") == 3


def test_a_number_that_nothing_explains_is_an_error_that_says_where() -> None:
    with pytest.raises(MaxportError, match="7919"):
        Lifter(FIELDS).lift((7919, 104729), "model.layers.0")


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(sorted(SIZES), 2)))
def test_products_hold_at_a_third_size(a: str, b: str) -> None:
    text = f"{a} * {b}"
    found = Lifter(FIELDS).lift(tuple(int(value(text, s)) for s in range(2)), "here")
    assert value(str(found), 2) == value(text, 2)


def test_matches_gives_further_expressions_for_ambiguous_numbers() -> None:
    fields = [
        FieldSource("heads", "hf.heads", (6, 8, 12), "int"),
        FieldSource("groups", "hf.groups", (2, 4, 3), "int"),
        FieldSource("other", "hf.other", (5, 4, 5), "int"),
    ]
    texts = [e.text for e in Lifter(fields).matches((5, 4))]
    assert texts[0] == "config.other"
    assert "config.heads // config.groups + 2" in texts
