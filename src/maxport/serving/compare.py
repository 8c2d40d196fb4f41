"""A server against the reference: which part is at fault where they differ.

Each check isolates one part: token counts and answers to text and to ids show the tokenizer; log
probabilities after given ids show the graph; what is chosen among them shows the sampler; running
the port's graph directly tells a wrong graph from a wrong pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from maxport.errors import MaxportError
from maxport.serving.client import Completion, Server

Verdict = Literal["equal", "differs", "not run"]
TEXTS = (
    "The capital of France is",
    "  two leading spaces,\nand a second line",
    "naïve café — 東京 🙂",
    "def f(x):\n    return x**2  # 1234567890",
    "Once upon a time, in a small village by the sea,",
)
LENGTHS = (1, 16, 64, 256)
#: Share of distinct 4-word runs below which a text counts as collapsed.
COLLAPSE = 0.2
TOP = 5
#: At fault where nothing tells them apart.
ANY = "graph, pipeline or server"
#: The reference's most likely tokens among which the server's are looked for.
RANKS = 50


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: What was compared.
        verdict: Its outcome.
        detail: What was found, or why it was not run.
        fault: Which part is at fault: `tokenizer`, `chat template`, `sampler`, `graph`,
            `pipeline`, `server`, or several of the last three where nothing tells them apart;
            empty where nothing is.
        max_diff: Largest difference of log probabilities, where they were compared.
        tolerance: What was allowed.
    """

    name: str
    verdict: Verdict
    detail: str = ""
    fault: str = ""
    max_diff: float | None = None
    tolerance: float | None = None


@dataclass
class Comparison:
    """The server, the reference and what they need to be compared.

    Args:
        server: The running server.
        reference: Has `logits(ids)`, (positions, vocab) float32, and `greedy(ids, steps)`.
        tokenizer: The checkpoint's Hugging Face tokenizer.
        tolerance: Largest difference of two logits allowed after given ids.
        direct: Logits of the port's graph run directly, (positions, vocab); None without a port.
        pipeline: Logits after all ids from MAX's pipeline in this process, (1, vocab); or None.
        texts: Prompts.
        lengths: Numbers of tokens to continue them by.
        say: Told in a few words what is being done.
    """

    server: Server
    reference: Any
    tokenizer: Any
    tolerance: Callable[[Sequence[int], np.ndarray], float]
    direct: Callable[[Sequence[int]], np.ndarray] | None = None
    pipeline: Callable[[Sequence[int]], np.ndarray] | None = None
    texts: Sequence[str] = TEXTS
    lengths: Sequence[int] = LENGTHS
    say: Callable[[str], None] = field(default=lambda text: None)

    def run(self) -> list[Check]:
        """All checks, the one that explains the others first.

        Raises:
            MaxportError: The server cannot be reached or refuses plain requests.
        """
        self.server.model_name()
        checks = [self.token_counts(), self.chat_template(), self.text_and_ids()]
        other_texts = any(check.fault == "tokenizer" for check in checks)
        checks.append(self.logprobs(by_text=not other_texts))
        return [*checks, *self.continuations(by_text=not other_texts)]

    def ids(self, text: str) -> list[int]:
        """The reference's tokens of a text."""
        return [int(i) for i in self.tokenizer(text)["input_ids"]]

    def token_counts(self) -> Check:
        """How many tokens the server makes of each text."""
        self.say("tokenizer")
        wrong = []
        for text in self.texts:
            found, expected = self.server.complete(text, 1).prompt_tokens, len(self.ids(text))
            if found is None:
                return Check("token counts", "not run", "the server does not count prompt tokens")
            if found != expected:
                wrong.append(f"{text[:30]!r}: {found} tokens, the reference {expected}")
        if wrong:
            return Check("token counts", "differs", "; ".join(wrong), "tokenizer")
        return Check("token counts", "equal", f"{len(self.texts)} texts")

    def chat_template(self) -> Check:
        """How many tokens the server makes of one chat message."""
        name = "chat template"
        if not getattr(self.tokenizer, "chat_template", None):
            return Check(name, "not run", "the checkpoint has no chat template")
        message = [{"role": "user", "content": self.texts[0]}]
        expected = self.tokenizer.apply_chat_template(
            message, tokenize=True, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        found = self.server.chat(self.texts[0], 1).prompt_tokens
        if found is None:
            return Check(name, "not run", "the server does not count prompt tokens")
        if found != len(expected):
            detail = f"{found} tokens, the reference {len(expected)}"
            return Check(name, "differs", detail, "chat template")
        return Check(name, "equal", f"{found} tokens")

    def text_and_ids(self) -> Check:
        """The same prompt as text and as ids: equal counts may still be other tokens."""
        name = "text against ids"
        worst = 0.0
        for text in self.texts:
            try:
                by_ids = self.server.complete(self.ids(text), 1, logprobs=TOP)
            except MaxportError as error:
                return Check(name, "not run", f"the server takes no token ids: {error.what}")
            by_text = self.server.complete(text, 1, logprobs=TOP)
            if not by_text.top or not by_ids.top:
                return Check(name, "not run", "the server gives no log probabilities")
            worst = max(worst, _gap(by_text.top[0], by_ids.top[0]))
            if worst > 1e-2:
                detail = f"{text[:30]!r} gives other log probabilities than its ids"
                return Check(name, "differs", detail, "tokenizer", worst, 1e-2)
        return Check(name, "equal", f"{len(self.texts)} texts", "", worst, 1e-2)

    def logprobs(self, *, by_text: bool = True) -> Check:
        """Log probabilities of the next token after given ids.

        A wrong tokenizer also decodes wrongly: then only their values are compared, in order.
        """
        self.say("log probabilities")
        name, worst, allowed, same = "log probabilities", 0.0, 0.0, 0
        for text in self.texts:
            ids = self.ids(text)
            try:
                answer = self.server.complete(ids, 1, logprobs=TOP)
            except MaxportError as error:
                return Check(name, "not run", f"the server takes no token ids: {error.what}")
            if not answer.top:
                return Check(name, "not run", "the server gives no log probabilities")
            logits = self.reference.logits(ids)
            limit = 2 * self.tolerance(ids, logits)
            gap, first = self._against_reference(answer, logits[-1], by_text)
            worst, allowed, same = max(worst, gap), max(allowed, limit), same + first
            if gap > limit:
                detail = f"after {text[:30]!r}; top token equal for {same} of {len(self.texts)}"
                return Check(name, "differs", detail, self._graph_fault(ids, logits), gap, limit)
        return Check(name, "equal", f"top token equal for {same} texts", "", worst, allowed)

    def _against_reference(
        self, answer: Completion, logits: np.ndarray, by_text: bool
    ) -> tuple[float, bool]:
        """Largest difference over the server's top tokens, and whether the first is the same."""
        expected = log_softmax(logits)
        ranked = np.argsort(expected)[::-1]
        if not by_text:
            values = sorted(answer.top[0].values(), reverse=True)
            gaps = [abs(v - float(expected[i])) for v, i in zip(values, ranked, strict=False)]
            return max(gaps), gaps[0] < 1e-2
        texts = {self.tokenizer.decode([int(i)]): float(expected[i]) for i in ranked[:RANKS][::-1]}
        top = answer.top[0]
        least = min(texts.values())  # a token further down has at most this: a gap is at least so
        gap = max(abs(value - texts.get(token, least)) for token, value in top.items())
        best = max(top, key=lambda token: top[token])
        return gap, best == self.tokenizer.decode([int(ranked[0])])

    def _graph_fault(self, ids: Sequence[int], logits: np.ndarray) -> str:
        """Whether the graph itself is wrong, its pipeline, or only what the server does."""
        allowed = self.tolerance(ids, logits)
        if self.direct is not None:
            self.say("the port's graph, run directly")
            if float(np.abs(self.direct(ids)[-1] - logits[-1]).max()) > allowed:
                return "graph"
        if self.pipeline is not None:
            self.say("MAX's pipeline, without the server")
            if float(np.abs(self.pipeline(ids)[-1] - logits[-1]).max()) <= allowed:
                return "server"
            return "graph or pipeline" if self.direct is None else "pipeline"
        return ANY if self.direct is None else "pipeline or server"

    def continuations(self, *, by_text: bool = True) -> list[Check]:
        """Greedy text at every length, what the sampler chose, and whether text collapses."""
        longest = max(self.lengths)
        self.say(f"{longest} tokens, reference")
        ids = self.ids(self.texts[0])
        expected = self.reference.greedy(ids, longest)[len(ids) :]
        self.say(f"{longest} tokens, server")
        answer = self.server.complete(self.texts[0], longest, logprobs=TOP, to_the_end=True)
        checks = [sampler(answer)]
        chose_otherwise = checks[0].verdict == "differs"
        if not by_text:
            why = "the tokenizer differs, so texts cannot be compared"
            return [*checks, *(Check(f"greedy {n}", "not run", why) for n in self.lengths)]
        for length in self.lengths:
            checks.append(self._greedy(length, expected, answer, ids, chose_otherwise))
        fault = next((check.fault for check in checks if check.fault), ANY)
        checks.append(collapse(answer.text, self.tokenizer.decode(expected), fault))
        return checks

    def _greedy(
        self,
        length: int,
        expected: Sequence[int],
        answer: Completion,
        ids: Sequence[int],
        chose_otherwise: bool,
    ) -> Check:
        name = f"greedy {length}"
        wanted = self.tokenizer.decode(list(expected[:length]), skip_special_tokens=True)
        found = answer.text
        if found.strip().startswith(wanted.strip()) or wanted.strip().startswith(
            found.strip() or "\0"
        ):
            made = len(answer.chosen)
            early = f"; the server ends after {made} tokens" if 0 < made < length else ""
            return Check(name, "equal", f"same text{early}")
        at = self._first_difference(found, expected)
        detail = f"leaves the reference's text at token {at + 1}"
        if chose_otherwise:
            return Check(name, "differs", f"{detail}; the sampler chose another token", "sampler")
        tokens = [*ids, *expected[:at]]
        logits = self.reference.logits(tokens)
        best = np.sort(logits[-1])[-2:]
        if best[1] - best[0] <= 2 * self.tolerance(tokens, logits):
            return Check(name, "equal", f"{detail}, a near-tie there")
        return Check(name, "differs", detail, self._graph_fault(tokens, logits))

    def _first_difference(self, found: str, expected: Sequence[int]) -> int:
        """Index of the first expected token that the found text does not continue with."""
        for count in range(1, len(expected) + 1):
            text = self.tokenizer.decode(list(expected[:count]), skip_special_tokens=True)
            if not found.strip().startswith(text.strip()):
                return count - 1
        return len(expected)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities, float64, of one row of logits."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _gap(one: dict[str, float], other: dict[str, float]) -> float:
    """Largest difference of two servers' top tokens; tokens only one of them has count fully."""
    both = one.keys() & other.keys()
    if not both:
        return float("inf")
    return max(abs(one[token] - other[token]) for token in both)


def sampler(answer: Completion) -> Check:
    """Whether every chosen token is the most likely one by the server's own numbers."""
    if not answer.top or not answer.chosen:
        return Check("sampler", "not run", "the server gives no log probabilities")
    pairs = list(zip(answer.chosen, answer.top, strict=False))
    wrong = [i for i, (chosen, top) in enumerate(pairs) if chosen < max(top.values()) - 1e-3]
    if wrong:
        detail = f"{len(wrong)} of {len(pairs)} tokens at temperature 0 are not the most likely, "
        return Check("sampler", "differs", f"{detail}the first is token {wrong[0] + 1}", "sampler")
    return Check("sampler", "equal", f"{len(pairs)} tokens are the most likely ones")


def distinct_share(text: str, run: int = 4) -> float:
    """Share of distinct runs of `run` words; of characters where a text has few words."""
    words: Sequence[str] = text.split()
    if len(words) < 2 * run:
        words = text
    runs = [tuple(words[i : i + run]) for i in range(len(words) - run + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def collapse(found: str, expected: str, fault: str) -> Check:
    """Whether the server's text repeats itself and the reference's does not; `fault` if so."""
    ours, theirs = distinct_share(found), distinct_share(expected)
    detail = f"{ours:.0%} distinct runs, the reference {theirs:.0%}"
    if ours < COLLAPSE <= theirs:
        return Check("collapse", "differs", detail, fault)
    return Check("collapse", "equal", detail)
