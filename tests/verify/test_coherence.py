"""The coherence tier on a twin with a tokenizer of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxport.verify import coherence, verify_port
from maxport.verify.coherence import distinct_share


@pytest.fixture(scope="module")
def with_tokenizer(helium: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("text") / "checkpoint"
    shutil.copytree(helium, folder)
    words = sorted({word for text in coherence.PROMPTS for word in text.split()})
    vocabulary = {"[unk]": 40, **{word: 41 + index for index, word in enumerate(words)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[unk]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coherence, "LENGTHS", (6, 20))


def test_a_right_port_continues_every_prompt_as_the_reference(
    with_tokenizer: Path, helium_port: Path
) -> None:
    report = verify_port(with_tokenizer, helium_port, tier="coherence")
    assert report.verdict == "equal", report.why
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["smoke", "coherence-6", "coherence-20"]
    assert rows["coherence-20"].positions == rows["coherence-20"].same_token == 100


def test_a_port_that_goes_astray_is_named_with_prompt_and_token(
    with_tokenizer: Path, edited_port: Callable[[str, str, str], Path]
) -> None:
    port = edited_port("helium.py", "interleaved=True", "interleaved=False")
    report = verify_port(with_tokenizer, port, tier="coherence")
    assert report.verdict == "differs"
    row = report.rows[-1]
    assert row.verdict == "differs"
    assert "leaves the reference at token" in row.why


def test_without_a_tokenizer_prompts_are_random_tokens(helium: Path, helium_port: Path) -> None:
    report = verify_port(helium, helium_port, tier="coherence")
    rows = report.rows[1:]
    assert [(row.name, row.verdict) for row in rows] == [
        ("coherence-6", "equal"),
        ("coherence-20", "equal"),
    ]
    assert all(row.proves.startswith("5 prompts") for row in rows)
    assert all("random tokens" in row.why for row in rows)
    assert [row.positions for row in rows] == [30, 100]


def test_a_length_that_the_model_does_not_take_is_not_run(helium: Path, helium_port: Path) -> None:
    report = verify_port(helium, helium_port, tier="coherence", max_length=20)
    assert [(row.name, row.verdict) for row in report.rows[1:]] == [
        ("coherence-6", "equal"),
        ("coherence-20", "not run"),
    ]
    assert "takes 20 tokens" in report.rows[-1].why


def test_a_port_that_repeats_one_token_has_collapsed(
    helium: Path, helium_port: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat(runner: object, prompts: list[list[int]], steps: int) -> list[list[int]]:
        return [[7] * steps for _ in prompts]

    monkeypatch.setattr(coherence, "_free_run", repeat)
    monkeypatch.setattr(coherence, "_near_tie", lambda *arguments: True)
    varied = np.random.default_rng(1).integers(0, 60, 64).tolist()
    monkeypatch.setattr(
        "maxport.verify.reference.Reference.greedy",
        lambda self, prompt, steps: [*prompt, *varied[:steps]],
    )
    report = verify_port(helium, helium_port, tier="coherence")
    assert report.verdict == "differs"
    assert "prompt 1 collapses into repetition" in report.why


def test_loops_have_few_distinct_runs() -> None:
    assert distinct_share([1, 2] * 50) < coherence.COLLAPSE
    assert distinct_share([7] * 64) < coherence.COLLAPSE
    text = np.random.default_rng(0).integers(0, 50, 64).tolist()
    assert distinct_share(text) > 0.9
    assert distinct_share([1, 2, 3]) == 1.0
