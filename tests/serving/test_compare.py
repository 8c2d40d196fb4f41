"""Planted faults are named; a right server passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_server import Faults, Model, Tokenizer, server

from maxport.errors import MaxportError
from maxport.serving.client import Server
from maxport.serving.compare import Check, Comparison, distinct_share

TEXTS = ("w5 w6 w7", "one two three four", "w9 again w11")


def compare(
    faults: Faults, direct: Any = None, pipeline: Any = None, tokenizer: Any = None
) -> dict[str, Check]:
    with server(faults, tokenizer) as url:
        checks = Comparison(
            server=Server(url),
            reference=Model(),
            tokenizer=Tokenizer(),
            tolerance=lambda ids, logits: 1e-3,
            direct=direct,
            pipeline=pipeline,
            texts=TEXTS,
            lengths=(1, 16),
        ).run()
    return {check.name: check for check in checks}


def named(checks: dict[str, Check]) -> set[str]:
    return {check.fault for check in checks.values() if check.fault}


def test_a_right_server_agrees_in_every_check() -> None:
    checks = compare(Faults())
    assert {check.verdict for check in checks.values()} == {"equal"}, checks
    assert list(checks) == [
        *("token counts", "chat template", "text against ids", "log probabilities", "sampler"),
        *("greedy 1", "greedy 16", "collapse"),
    ]


def test_an_extra_token_before_the_prompt_is_the_tokenizer() -> None:
    checks = compare(Faults(tokens=lambda ids: [1, *ids]))
    assert checks["token counts"].fault == checks["text against ids"].fault == "tokenizer"
    assert "4 tokens, the reference 3" in checks["token counts"].detail
    assert checks["log probabilities"].verdict == "equal" and named(checks) == {"tokenizer"}
    assert "the tokenizer differs" in checks["greedy 16"].detail


def test_other_tokens_of_equal_count_are_the_tokenizer() -> None:
    class Swapped(Tokenizer):
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [i ^ 1 for i in super().__call__(text)["input_ids"]]}

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            return super().decode([i ^ 1 for i in ids])

    checks = compare(Faults(), tokenizer=Swapped())
    assert checks["token counts"].verdict == checks["log probabilities"].verdict == "equal"
    assert checks["text against ids"].fault == "tokenizer" and named(checks) == {"tokenizer"}


def test_a_wrong_chat_template() -> None:
    checks = compare(Faults(chat=lambda ids: ids[:-1]))
    assert named(checks) == {"chat template"}
    assert checks["chat template"].detail == "5 tokens, the reference 6"


@pytest.mark.parametrize(
    ("direct", "pipeline", "fault"),
    [
        (None, None, "graph, pipeline or server"),
        ("wrong", None, "graph"),
        ("wrong", "wrong", "graph"),
        ("right", None, "pipeline or server"),
        ("right", "wrong", "pipeline"),
        ("right", "right", "server"),
        (None, "wrong", "graph or pipeline"),
    ],
)
def test_graph_pipeline_and_server_are_told_apart(
    direct: str | None, pipeline: str | None, fault: str
) -> None:
    runs = {"wrong": Model(shift=0.5).logits, "right": Model().logits, None: None}
    checks = compare(Faults(model=Model(shift=0.5)), runs[direct], runs[pipeline])
    found = checks["log probabilities"]
    assert found.fault == fault and found.max_diff > found.tolerance
    assert "tokenizer" not in named(checks) and checks["sampler"].verdict == "equal"


def test_a_sampler_that_does_not_choose_the_most_likely_token() -> None:
    checks = compare(Faults(choose=lambda row: int(np.argsort(row)[-2])))
    assert checks["sampler"].fault == "sampler" and named(checks) == {"sampler"}
    assert "16 of 16" in checks["sampler"].detail
    assert checks["log probabilities"].verdict == "equal"


def test_collapse_into_one_token() -> None:
    class Stuck(Model):
        def logits(self, ids: Sequence[int]) -> np.ndarray:
            logits = super().logits(ids)
            logits[:, 7] += 1000
            return logits

    checks = compare(Faults(model=Stuck()), Model().logits, Stuck().logits)
    assert checks["collapse"].verdict == "differs"
    assert named(checks) == {"pipeline"}, "what the other checks found explains the collapse"
    assert distinct_share("a b c d e f g h i j") == 1.0 and distinct_share("x " * 40) < 0.1


def test_an_early_end_is_said() -> None:
    class Short(Tokenizer):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            return super().decode(ids[:4], skip_special_tokens)

    faults = Faults(ends_after=4)
    with server(faults, Short()) as url:
        checks = Comparison(
            Server(url), Model(), Short(), lambda i, x: 1e-3, texts=TEXTS, lengths=(1, 16)
        ).run()
    assert {c.name: c.detail for c in checks}["greedy 16"].endswith("ends after 4 tokens")
    assert faults.asked_to_go_on


def test_near_ties_may_go_either_way() -> None:
    class Tie(Model):
        def __init__(self, first: int) -> None:
            super().__init__()
            self.first = first

        def logits(self, ids: Sequence[int]) -> np.ndarray:
            logits = super().logits(ids)
            logits[:, [3, 4]] = 50.0
            logits[:, self.first] += 1e-4
            return logits

    with server(Faults(model=Tie(4))) as url:
        checks = Comparison(
            Server(url), Tie(3), Tokenizer(), lambda ids, logits: 1e-3, texts=TEXTS, lengths=(1,)
        ).run()
    (greedy,) = [check for check in checks if check.name == "greedy 1"]
    assert greedy.verdict == "equal" and "near-tie" in greedy.detail


def test_what_a_server_does_not_give_is_said() -> None:
    checks = compare(Faults(logprobs=False, usage=False))
    assert checks["log probabilities"].verdict == checks["sampler"].verdict == "not run"
    assert "no log probabilities" in checks["log probabilities"].detail
    assert "does not count" in checks["token counts"].detail
    assert checks["greedy 16"].verdict == "equal"
    assert "takes no token ids" in compare(Faults(ids=False))["log probabilities"].detail


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(status=503), "refuses (503)"),
        (Faults(raw=b"<html>"), "not JSON"),
        (Faults(raw=b'{"data": []}'), "lists no model"),
    ],
)
def test_servers_that_are_none(faults: Faults, message: str) -> None:
    with pytest.raises(MaxportError) as caught:
        compare(faults)
    assert message in caught.value.what


def test_no_server_and_a_slow_one() -> None:
    with pytest.raises(MaxportError, match=r"no server answers.*maxport serve"):
        Server("http://127.0.0.1:9").model_name()

    class Slow(Model):
        def logits(self, ids: Sequence[int]) -> np.ndarray:
            import time

            time.sleep(0.5)
            return super().logits(ids)

    with server(Faults(model=Slow())) as url, pytest.raises(MaxportError, match="did not answer"):
        Server(url, timeout_s=0.2).complete("w1", 1)
