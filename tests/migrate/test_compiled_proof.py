"""A migrated decoder compiled beside V2's: the same logits, the same greedy tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from maxport.cli.migrate import command
from maxport.migrate.compiled import compare_runners
from maxport.migrate.proving import _Compiling


class Counting:
    """A runner whose next token is the last one plus a stride."""

    def __init__(self, stride: int, shift: float = 0.0) -> None:
        self.stride, self.shift = stride, shift

    def step(self, batch: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        rows = {}
        for key, tokens in batch.items():
            rows[key] = np.full((len(tokens), 64), self.shift, np.float32)
            for at, token in enumerate(tokens):
                rows[key][at, (token + self.stride) % 64] += 1
        return rows


def test_the_same_tokens_and_logits_are_equal() -> None:
    proof = compare_runners(Counting(3), Counting(3), steps=4)
    assert proof.equal
    assert proof.max_diff == 0.0
    assert proof.tokens[0] == ((16, 19, 22, 25), (16, 19, 22, 25))
    assert proof.to_json()["equal"] is True


def test_other_tokens_or_other_logits_are_not() -> None:
    other = compare_runners(Counting(3), Counting(4), steps=4)
    assert not other.equal
    assert other.tokens[1][0] != other.tokens[1][1]
    shifted = compare_runners(Counting(3), Counting(3, shift=0.1), steps=4)
    assert not shifted.equal
    assert shifted.max_diff == pytest.approx(0.1)
    assert shifted.tokens[0][0] == shifted.tokens[0][1]


def test_the_compiling_process_ends_when_it_is_not_asked(tmp_path: Path) -> None:
    child = _Compiling(tmp_path, tmp_path)
    assert child.process.poll() is None
    child.close()
    assert child.process.poll() is not None


def test_what_the_compiling_process_says_is_reported(tmp_path: Path) -> None:
    child = _Compiling(tmp_path / "none", tmp_path)
    found = child.result("LlamaForCausalLM", tmp_path)
    assert found["equal"] is False
    assert found["error"]


@pytest.mark.compiled
def test_both_packages_compiled_say_the_same(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["llama3", "-o", str(tmp_path), "--compile", "--json"])
    assert result.exit_code == 0, result.output
    proof = json.loads(result.stdout)["proof"]
    assert proof["verdict"] == "equal"
    assert proof["compiled"]["equal"] is True
    for first, second in proof["compiled"]["tokens"]:
        assert len(first) == 8
        assert first == second
