"""Docstrings and comments that name other models or claim what the code does not do."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from maxport.checkpoint.known import causal_lm_classes
from maxport.gates.base import Finding, GateResult, Port, Subject

NAME = "docstrings"
Verdict = Literal["OK", "lie", "stale"]

#: Claims and what the port's code must contain for them to be true.
CLAIMS = (
    (r"\bQK[- ]?norm\w*", r"q_norm|k_norm|qk_norm|q_layernorm|query_norm"),
    (r"\bsliding[- ]window\b", r"sliding|window"),
    (r"\bRMS ?[Nn]orm\w*", r"RMSNorm|rms_norm"),
    (r"\bLayerNorm\b|\blayer norm\b", r"LayerNorm|layer_norm"),
    (r"\bRoPE\b|\brotary\b", r"rope|rotary|freqs|\bcos\b"),
    (r"\bMoE\b|\bmixture of experts\b", r"expert|moe|router"),
    (r"\bSwiGLU\b", r"silu|swiglu|swish"),
    (r"\bGeGLU\b", r"gelu"),
    (r"\bsingle[- ](GPU|device)\b", r"multi_gpu_supported=False|single_device"),
    (r"\bmulti[- ]?(GPU|device)\b", r"multi_gpu_supported=True|distributed"),
)
DENIED = re.compile(r"\b(no|not|never|without|unlike|instead of|neither|rather than)\b", re.I)
SHORTEST = 3


@dataclass(frozen=True)
class Text:
    """A docstring or a run of comment lines."""

    file: str
    line: int
    text: str
    kind: Literal["docstring", "comment"]


@dataclass(frozen=True)
class Mention:
    """A foreign model's name or a claim, and whether it is true."""

    text: Text
    phrase: str
    verdict: Verdict
    why: str


def check(subject: Subject) -> GateResult:
    """All mentions; those that are lies or stale are findings."""
    words = " ".join([str(subject.config.get("model_type", "")), *nested_words(subject.config)])
    mentions = audit(subject.port, subject.class_name, words)
    findings = tuple(
        Finding(
            f"{mention.verdict}: {mention.phrase!r}: {mention.why}",
            f"{mention.text.file}:{mention.text.line}",
            "say what this file does and which Hugging Face lines it mirrors",
        )
        for mention in mentions
        if mention.verdict != "OK"
    )
    fine = sum(mention.verdict == "OK" for mention in mentions)
    return GateResult(NAME, f"{fine} names and claims, all true", findings)


def nested_words(config: object, depth: int = 0) -> Iterator[str]:
    """Keys and strings below config.json's top level, where techniques are named after models.

    A rotary embedding of type `llama3` may be called Llama 3's in any model.
    """
    if isinstance(config, Mapping):
        for key, value in config.items():
            if depth:
                yield str(key)
            yield from nested_words(value, depth + 1)
    elif isinstance(config, str) and depth > 1:
        yield config


def audit(port: Port, class_name: str, words: str) -> list[Mention]:
    """Every mention in the port's docstrings and comments.

    Args:
        port: The port's sources.
        class_name: `architectures[0]`; its family's name may be used freely.
        words: What else may be used: config.json's model type and `nested_words`.
    """
    codes = {name: _code(tree) for name, tree in port.trees.items()}
    code = "\n".join(codes.values())
    own = f"{class_name} {words} {port.folder.name}".lower().replace("_", "")
    mentions: list[Mention] = []
    for text in texts(port):
        mentions += _names(text, own, codes[text.file])
        mentions += _claims(text, code)
    return mentions


def texts(port: Port) -> Iterator[Text]:
    """Docstrings and comments of all files."""
    for name, tree in port.trees.items():
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if not isinstance(body, list):
                continue
            for statement in body:
                if said := _text(statement):
                    yield Text(name, statement.lineno, said, "docstring")
        reader = io.StringIO(port.sources[name]).readline
        for token in tokenize.generate_tokens(reader):
            if token.type == tokenize.COMMENT:
                yield Text(name, token.start[0], token.string.lstrip("# "), "comment")


def _code(tree: ast.Module) -> str:
    """The code without docstrings and comments."""
    bare = ast.parse(ast.unparse(tree))
    for node in ast.walk(bare):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _text(s)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(bare)


def _text(statement: ast.stmt) -> str:
    """The text of a string that stands by itself, or empty."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else ""
    return ""


@cache
def families() -> frozenset[str]:
    """Names of language model families, from the causal-LM table of transformers."""
    words = {re.split(r"[_\-.\d]", kind)[0] for kind in causal_lm_classes()}
    return frozenset(word for word in words if len(word) >= SHORTEST and word not in ORDINARY)


#: First words of model types that are also ordinary words.
ORDINARY = frozenset(
    {"big", "code", "data", "dots", "flex", "git", "got", "openai", "recurrent", "seed", "solar"}
    | {"speech", "text", "xlm"}
)


def _names(text: Text, own: str, code: str) -> Iterator[Mention]:
    """Foreign families named in one text."""
    for match in re.finditer(r"[A-Za-z]{3,}", text.text):
        word = match.group()
        family = word.lower()
        if family not in families() or family in own:
            continue
        if len(word) < 4 and word.islower():
            continue  # "opt" is a model in capitals only
        yield _judged(text, match, family, code)


def _judged(text: Text, match: re.Match[str], family: str, code: str) -> Mention:
    sentence = _sentence(text.text, match.start())
    if re.search(rf"^\s*(from|import)\b.*{family}", code, re.I | re.M):
        return Mention(text, match.group(), "OK", "the file imports that code")
    if DENIED.search(sentence) or re.search(r"\b(as in|like|from|see|same as)\b", sentence, re.I):
        return Mention(text, match.group(), "OK", "said to differ or to be the origin")
    if text.kind == "docstring":
        return Mention(text, match.group(), "lie", "the docstring describes another model")
    return Mention(text, match.group(), "stale", "the comment is about another model")


def _claims(text: Text, code: str) -> Iterator[Mention]:
    for claim, proof in CLAIMS:
        match = re.search(claim, text.text, re.I)
        if match is None:
            continue
        true = bool(re.search(proof, code)) or bool(
            DENIED.search(_sentence(text.text, match.start()))
        )
        verdict: Verdict = "OK" if true else "lie"
        yield Mention(text, match.group(), verdict, "" if true else "nothing in the code does that")


def _sentence(text: str, at: int) -> str:
    start = max(text.rfind(". ", 0, at), text.rfind("\n\n", 0, at)) + 1
    end = text.find(". ", at)
    return text[start : end if end >= 0 else len(text)]
