"""Judge MAX's own architectures against transformers on twin checkpoints, by evaluation.

Called by native.py in processes of their own, because importing MAX makes forking unsafe and a
process that has simulated GPUs keeps them:

    python bench/native_row.py Olmo2ForCausalLM:v2 LlamaForCausalLM:v3 --out rows.jsonl
    python bench/native_row.py Olmo2ForCausalLM:v2 --set rms_norm_eps=1e-6
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from native_twin import NotJudged, make_twin, reference_of, twin_of

from maxport.errors import MaxportError
from maxport.migrate.twins import YARN

#: Where and in which precision to try, until one builds. float32 shows differences rounding-free;
#: many architectures take GPUs (simulated here) or bfloat16 only.
ATTEMPTS = (("cpu", "float32"), ("gpu", "float32"), ("gpu", "bfloat16"))
#: Besides, where MAX asks for a quantized checkpoint.
QUANTIZED = (("gpu", "float8_e4m3fn"), ("2 gpus", "float8_e4m3fn"))

#: Stands among a row's changes for the whole checkpoint of a model of images and text.
IMAGES = "(vision part)"

#: Ragged prefill, chunks and decode through the cache; sequence -> (begin, end) of its tokens.
SCHEDULE: tuple[dict[int, tuple[int, int]], ...] = (
    {0: (0, 23), 1: (0, 4)},
    {0: (23, 24), 1: (4, 9)},
    {0: (24, 31), 1: (9, 10)},
    {0: (31, 32), 1: (10, 11)},
    {0: (32, 33)},
)
MAX_LENGTH = 256


@dataclass(frozen=True)
class Judged:
    """What a comparison found."""

    max_diff: float
    tolerance: float
    positions: int
    compared: str


def judge_row(name: str, lane: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Try the attempts in turn; the first that builds gives the verdict.

    Args:
        name: Hugging Face class name.
        lane: `v2` or `v3`.
        changes: Config fields to set in the twin, for finding a difference's cause.
    """
    refusals: dict[str, str] = {}
    row: dict[str, Any] = {}
    for device, encoding in (*ATTEMPTS, *QUANTIZED):
        asked = "expert parallel" if device == "2 gpus" else "quantiz"
        if (device, encoding) in QUANTIZED and asked not in row["why"]:
            break
        row = judge(name, lane, device, encoding, changes)
        extra = missing(row)
        if extra:
            retry = judge(name, lane, device, encoding, {**changes, **extra})
            if retry["verdict"] != "no-reference":
                row = {**retry, "changes": extra}
        if row["verdict"] != "cannot-load":
            break
        refusals[f"{device} {encoding}"] = row["why"]
    if refusals:
        row["refused"] = refusals
    if row["verdict"] == "cannot-load" and len(set(refusals.values())) > 1:
        where: dict[str, list[str]] = {}
        for place, why in refusals.items():
            where.setdefault(why, []).append(place)
        row["why"] = "; ".join(f"{why} [{', '.join(at)}]" for why, at in where.items())
    return row


def missing(row: Mapping[str, Any]) -> dict[str, Any]:
    """What published checkpoints have, the twin lacks, and the row's verdict asks for."""
    why = row["why"]
    if row["verdict"] == "cannot-load" and ("yarn" in why or "rope scal" in why):
        # Every published config of some families has it, a class default lacks it.
        return {"rope_parameters": YARN}
    if row["verdict"] == "cannot-load" and "vision_config" in why:
        return {IMAGES: True}
    if row["verdict"] == "no-reference" and "ForConditionalGeneration: no tiny twin" in why:
        return {IMAGES: True}
    return {}


def judge(
    name: str, lane: str, device: str, encoding: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """One attempt.

    Args:
        name: Hugging Face class name.
        lane: `v2` or `v3`.
        device: `cpu`, `gpu` or `2 gpus` (simulated).
        encoding: `float32`, `bfloat16` or `float8_e4m3fn`.
        changes: Config fields to set in the twin; `IMAGES` for its vision part.
    """
    row: dict[str, Any] = {"device": device, "encoding": encoding, "engine": "evaluate"}
    seconds: dict[str, float] = {}
    row["seconds"] = seconds
    begun = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="maxport-native-") as temp:
            fields = {key: value for key, value in changes.items() if key != IMAGES}
            images = bool(changes.get(IMAGES))
            folder = make_twin(name, encoding, Path(temp), fields, images=images)
            seconds["twin"] = round(time.perf_counter() - begun, 1)
            found = compare(name, lane, device, encoding, folder, seconds)
    except NotJudged as error:
        # MAX's messages name files by where they are installed.
        why = re.sub(r"[^\s']*/site-packages/", "", error.why)
        return {**row, "verdict": error.verdict, "why": why}
    except Exception as error:  # a fault of ours; the sweep goes on
        return {**row, "verdict": "error", "why": f"{type(error).__name__}: {error}"[:600]}
    finally:
        seconds["total"] = round(time.perf_counter() - begun, 1)
    verdict = "equal" if found.max_diff <= found.tolerance else "differs"
    return {
        **row,
        "verdict": verdict,
        "max_diff": found.max_diff,
        "tolerance": found.tolerance,
        "positions": found.positions,
        "compared": found.compared,
        "why": "" if verdict == "equal" else difference(found),
    }


def difference(found: Judged) -> str:
    """A difference in one sentence, before its cause is known."""
    return f"{found.compared} differ by up to {found.max_diff:.2g}, tolerance {found.tolerance:.2g}"


def compare(
    name: str, lane: str, device: str, encoding: str, folder: Path, seconds: dict[str, float]
) -> Judged:
    """Build, evaluate, run the reference, and measure."""
    from native_embedding import build_embedding, embedding_model

    from maxport.engine.build import build_native, ensure_gpus
    from maxport.engine.evaluator.call import Unsupported
    from maxport.engine.registry import native_architecture

    begun = time.perf_counter()
    count = 2 if device == "2 gpus" else 1
    if device != "cpu":
        ensure_gpus(8)
    embedding = native_architecture(name, lane).task.name == "EMBEDDINGS_GENERATION"
    try:
        if embedding:
            built = build_embedding(name, folder, lane, device, encoding)
        else:
            built = build_native(
                name,
                folder,
                lane=lane,
                device="cpu" if device == "cpu" else "gpu",
                devices=count,
                encoding=encoding,
                max_length=MAX_LENGTH,
            )
    except MaxportError as error:
        # Only what MAX itself says counts as its refusal.
        theirs = error.what.startswith("the graph does not build")
        raise NotJudged("cannot-load" if theirs else "error", str(error)) from error
    seconds["build"] = round(time.perf_counter() - begun, 1)
    begun = time.perf_counter()
    try:
        measure = embedding_model if embedding else text_model
        return Judged(*measure(built, folder))
    except MaxportError as error:
        if isinstance(error.__cause__, Unsupported):
            # The graph asks a kernel for what no reference computes.
            raise NotJudged("differs", error.what) from error
        raise NotJudged("error", str(error)) from error
    finally:
        seconds["evaluate"] = round(time.perf_counter() - begun, 1)


def widen(runner: Any) -> None:
    """Let the runner carry half precision as float32: a graph that MAX builds in bfloat16 only is
    then judged as sharply as a float32 one, on the same rounded weights as the reference.
    """
    from maxport.engine.evaluator import Program

    quantized = runner.built.encoding.startswith("float8")
    runner.program = Program(runner.built.graph, widen=True, widen_float8=quantized)
    wide: dict[int, Any] = {}
    for index, pool in runner.cache._pools.items():
        if pool.dtype in runner.program.widened:
            runner.cache._pools[index] = wide.setdefault(id(pool), pool.float())


def text_model(built: Any, folder: Path) -> tuple[float, float, int, str]:
    """Compare logits of all positions, or of the last ones where the graph gives no others."""
    from maxport.engine.runner import EvaluatedRunner
    from maxport.verify.probes import token_source
    from maxport.verify.reference import NoReference, load_reference
    from maxport.verify.tolerance import derive

    try:
        reference = load_reference(reference_of(folder))
    except NoReference as error:
        raise NotJudged("no-reference", error.what) from error
    if built.encoding != "float32":
        round_scalars(reference.model)
    draw = token_source(reference.config, 0)
    schedule = past_windows(reference.config)
    lengths: dict[int, int] = {}
    for step in schedule:
        lengths |= {key: end for key, (_, end) in step.items()}
    sequences = {key: draw(length) for key, length in sorted(lengths.items())}
    expected = {key: reference.logits(tokens) for key, tokens in sequences.items()}
    tolerance = derive(reference, sequences, expected, "float32")
    runner = EvaluatedRunner(built)
    widen(runner)
    worst, positions, compared = 0.0, 0, "logits of all positions"
    for step in schedule:
        batch = {key: sequences[key][begin:end] for key, (begin, end) in step.items()}
        outputs = runner.outputs(batch)
        total = int(outputs.row_offsets[-1])
        rows = [range(begin, end) for begin, end in step.values()]
        got = outputs.named.get("logits")
        if got is None or len(got) != total:
            compared = "logits of last positions"
            got = outputs.named["next_token_logits"]
            rows = [range(end - 1, end) for _, end in step.values()]
        want = np.concatenate(
            [expected[key][list(row)] for key, row in zip(step, rows, strict=True)]
        )
        width = min(got.shape[-1], want.shape[-1])  # some graphs pad the vocabulary
        gap = np.abs(got.reshape(len(want), -1)[:, :width] - want[:, :width])
        worst = float("inf") if np.isnan(gap).any() else max(worst, float(gap.max()))
        positions += len(want)
    return worst, tolerance.value, positions, compared


def past_windows(config: Any) -> tuple[dict[int, tuple[int, int]], ...]:
    """The schedule, its first sequence filling the widest window that tokens are pooled in."""
    widest = max((getattr(config, "compress_rates", None) or {"": 0}).values())
    first = {0: (0, SCHEDULE[0][0][1] + widest), 1: SCHEDULE[0][1]}
    moved = [
        {key: (a + widest, b + widest) if key == 0 else (a, b) for key, (a, b) in step.items()}
        for step in SCHEDULE[1:]
    ]
    return (first, *moved)


def round_scalars(model: Any) -> None:
    """Round the reference's scalar buffers to bfloat16, as transformers does in a bfloat16 model.

    Gemma's embedding scale is one: graph and bfloat16 reference both hold its rounded value.
    """
    import torch

    for buffer in model.buffers():
        if buffer.numel() == 1 and buffer.is_floating_point():
            buffer.copy_(buffer.to(torch.bfloat16))


def alternatives(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Other values for config fields that change the computation but no weight's shape.

    The likely ones first. A difference that one of them removes comes from that field.
    """
    head_dim = config.get("head_dim") or (
        config.get("hidden_size", 0) // max(1, config.get("num_attention_heads", 1))
    )
    if config.get("head_dim") and config.get("num_attention_heads"):
        yield "head_dim", config["hidden_size"] // config["num_attention_heads"]
    for key, value in config.items():
        if key.endswith(("eps", "epsilon")) and isinstance(value, float):
            yield from ((key, other) for other in (1e-6, 1e-5, 1e-12) if other != value)
    for key in ("rope_parameters", "rope_scaling"):
        yield from ((key, other) for other in _other_rope(config.get(key)))
    for key, value in config.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if key == "sliding_window":
            yield key, 4096
        elif key.startswith("query_pre_attn"):
            yield key, head_dim
        elif any(word in key for word in ("scal", "multiplier", "softcap", "factor", "limit")):
            yield from ((key, other) for other in (1.0, None) if other != value)
    for key, value in config.items():
        if isinstance(value, bool) and key.startswith(("norm_", "use_", "attention_", "mlp_")):
            yield key, not value
        elif key == "hidden_act" or key == "hidden_activation":
            yield from ((key, other) for other in ("silu", "gelu", "relu") if other != value)


def _other_rope(value: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if isinstance(inner, bool):
            yield {**value, key: not inner}
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from ({**value, key: other} for other in _other_rope(inner))
        elif isinstance(inner, float) and key in ("factor", "rope_theta", "partial_rotary_factor"):
            yield from ({**value, key: other} for other in (1.0, 10000.0) if other > inner / 2)
            yield {**value, key: 1.0}
    if "rope_type" in value and value["rope_type"] != "default":
        theta = value.get("rope_theta", 10000.0)
        yield {"rope_type": "default", "rope_theta": theta}


def find_causes(
    row: Mapping[str, Any], name: str, lane: str, limit_seconds: float
) -> tuple[dict[str, Any], float]:
    """Config fields whose other values together make the architectures agree.

    The change that lowers the difference most is kept, then the next one is looked for. Returns
    the changes and the difference that is left; no changes if none halves it.
    """
    begun = time.perf_counter()
    where = (name, lane, row["device"], row["encoding"])
    base = dict(row.get("changes", {}))
    values = {**twin_of(name).to_dict(), **base}
    changes: dict[str, Any] = {}
    left = float(row.get("max_diff", "inf"))
    while left > row.get("tolerance", 0.0):
        best: tuple[float, str, Any] = (left / 2, "", None)
        for key, value in alternatives({**values, **changes}):
            if time.perf_counter() - begun > limit_seconds:
                break
            tried = judge(*where, {**base, **changes, key: value})
            if tried.get("max_diff", left) < best[0] or tried["verdict"] == "equal":
                best = (tried["max_diff"], key, value)
            if tried["verdict"] == "equal":
                break
        if not best[1]:
            break
        left = best[0]
        changes[best[1]] = best[2]
    return changes, left


def explain(row: dict[str, Any], name: str, lane: str, limit_seconds: float) -> None:
    """Add the config fields that a difference comes from, if they are found."""
    changes, left = find_causes(row, name, lane, limit_seconds)
    if not changes:
        return
    row["cause"] = {"changes": changes, "max_diff": left}
    listed = " and ".join(f"{key} = {json.dumps(value)}" for key, value in changes.items())
    agree = "equal" if left <= row.get("tolerance", left) else "still different"
    row["why"] += f"; {agree} (by {left:.2g}) with {listed}"


def main() -> None:
    """Print, or append to a file, one row per architecture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", metavar="NAME:LANE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--cause", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pairs = [setting.partition("=")[::2] for setting in arguments.set]
    changes = {key: json.loads(value) for key, value in pairs}
    warnings.filterwarnings("ignore")
    for item in arguments.rows:
        name, _, lane = item.partition(":")
        row = {"name": f"{name} {lane}", **judge_row(name, lane, changes)}
        if row["verdict"] == "differs" and arguments.cause:
            explain(row, name, lane, arguments.cause)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        else:
            print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
