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


def test_loops_have_few_distinct_runs() -> None:
    assert distinct_share([1, 2] * 50) < coherence.COLLAPSE
    assert distinct_share([7] * 64) < coherence.COLLAPSE
    text = np.random.default_rng(0).integers(0, 50, 64).tolist()
    assert distinct_share(text) > 0.9
    assert distinct_share([1, 2, 3]) == 1.0
