"""Judge one of MAX's own architectures against transformers on a twin checkpoint, by evaluation.

Called by native.py in a process of its own, because a process sees either the machine's devices or
simulated GPUs, and importing MAX makes forking unsafe:

    python bench/native_row.py Olmo2ForCausalLM v2 cpu float32 --out row.json
    python bench/native_row.py Olmo2ForCausalLM v2 cpu float32 --set rms_norm_eps=1e-6
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxport.errors import MaxportError

#: Keys that published config.json files have, transformers' config classes drop on saving, and
#: MAX reads. Values are those of the published DeepSeek-V2-Lite and -V3 configs.
PUBLISHED_KEYS: dict[str, Any] = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
}

#: Ragged prefill, chunks and decode through the cache; sequence -> (begin, end) of its tokens.
SCHEDULE: tuple[dict[int, tuple[int, int]], ...] = (
    {0: (0, 23), 1: (0, 4)},
    {0: (23, 24), 1: (4, 9)},
    {0: (24, 31), 1: (9, 10)},
    {0: (31, 32), 1: (10, 11)},
    {0: (32, 33)},
)
LENGTHS = (33, 11)
MAX_LENGTH = 256


class NotJudged(Exception):
    """The row has a verdict without numbers."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(why)
        self.verdict, self.why = verdict, why


@dataclass(frozen=True)
class Judged:
    """What a comparison found."""

    max_diff: float
    tolerance: float
    positions: int
    compared: str


def judge(
    name: str, lane: str, device: str, encoding: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The row of one architecture, as native.py stores it.

    Args:
        name: Hugging Face class name.
        lane: `v2` or `v3`.
        device: `cpu` or `gpu` (simulated).
        encoding: `float32` or `bfloat16`.
        changes: Config fields to set in the twin, for finding a difference's cause.
    """
    row: dict[str, Any] = {"device": device, "encoding": encoding, "engine": "evaluate"}
    seconds: dict[str, float] = {}
    row["seconds"] = seconds
    begun = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="maxport-native-") as temp:
            folder, added = make_twin(name, encoding, Path(temp), changes)
            seconds["twin"] = round(time.perf_counter() - begun, 1)
            found = compare(name, lane, device, encoding, folder, added, seconds)
    except NotJudged as error:
        return {**row, "verdict": error.verdict, "why": error.why}
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


def make_twin(
    name: str, encoding: str, temp: Path, changes: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """A twin checkpoint of transformers' class `name`, and the keys added to its config.json."""
    import torch
    import transformers

    from maxport.twin import default_config, save_twin, twin_config

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cls = getattr(transformers, name, None)
    if cls is None or getattr(cls, "config_class", None) is None:
        raise NotJudged("no-reference", f"transformers {transformers.__version__} has no {name}")
    model_type = cls.config_class.model_type
    try:
        config = twin_config(default_config(model_type), 0)
        for key, value in changes.items():
            setattr(config, key, value)
        config.architectures = [name]
        if hasattr(config, "is_decoder") and "CausalLM" not in name:
            config.is_decoder = False
        folder = save(cls, config, temp / "twin", getattr(torch, encoding), save_twin)
    except MaxportError as error:
        raise NotJudged("no-reference", f"no twin of {name}: {error.what}") from error
    path = folder / "config.json"
    written = json.loads(path.read_text("utf-8"))
    added = {key: value for key, value in PUBLISHED_KEYS.items() if key not in written}
    written["architectures"] = [name]
    path.write_text(json.dumps({**written, **added}, indent=2), "utf-8")
    return folder, added


def save(cls: Any, config: Any, folder: Path, dtype: Any, save_twin: Any) -> Path:
    """Write the twin; encoders, which are no causal LMs, are built by their own class."""
    from maxport.twin.model import randomise

    if "CausalLM" in cls.__name__ or "ConditionalGeneration" in cls.__name__:
        return Path(save_twin(config, folder, dtype=dtype))
    model = cls(config).to(dtype).eval()
    randomise(model, 1)
    model.save_pretrained(folder)
    return folder


def compare(
    name: str,
    lane: str,
    device: str,
    encoding: str,
    folder: Path,
    added: Mapping[str, Any],
    seconds: dict[str, float],
) -> Judged:
    """Build, evaluate, run the reference, and measure."""
    from maxport.engine.build import build_native, ensure_gpus

    begun = time.perf_counter()
    if device == "gpu":
        ensure_gpus(8)
    try:
        built = build_native(
            name, folder, lane=lane, device=device, encoding=encoding, max_length=MAX_LENGTH
        )
    except MaxportError as error:
        raise NotJudged("cannot-load", error.what) from error
    seconds["build"] = round(time.perf_counter() - begun, 1)
    if built.kv_params is None and "tokens" not in {role.name for role in built.roles}:
        raise NotJudged("error", f"inputs {', '.join(built.input_names)} are not known")
    begun = time.perf_counter()
    try:
        return text_model(built, folder, encoding)
    finally:
        seconds["evaluate"] = round(time.perf_counter() - begun, 1)


def text_model(built: Any, folder: Path, encoding: str) -> Judged:
    """Compare logits of all positions, or of the last ones where the graph gives no others."""
    from maxport.engine.runner import EvaluatedRunner
    from maxport.verify.probes import token_source
    from maxport.verify.reference import NoReference, load_reference
    from maxport.verify.tolerance import derive

    try:
        reference = load_reference(folder)
    except NoReference as error:
        raise NotJudged("no-reference", error.what) from error
    draw = token_source(reference.config, 0)
    sequences = {key: draw(length) for key, length in enumerate(LENGTHS)}
    expected = {key: reference.logits(tokens) for key, tokens in sequences.items()}
    tolerance = derive(reference, sequences, expected, encoding)
    try:
        runner = EvaluatedRunner(built)
    except MaxportError as error:
        raise NotJudged("error", str(error)) from error
    worst, positions, compared = 0.0, 0, "logits of all positions"
    for step in SCHEDULE:
        batch = {key: sequences[key][begin:end] for key, (begin, end) in step.items()}
        try:
            outputs = runner.outputs(batch)
        except MaxportError as error:
            raise NotJudged("error", str(error)) from error
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
    return Judged(worst, tolerance.value, positions, compared)


def alternatives(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Other values for config fields that change the computation but no weight's shape.

    The likely ones first. A difference that one of them removes comes from that field.
    """
    head_dim = config.get("head_dim") or (
        config.get("hidden_size", 0) // max(1, config.get("num_attention_heads", 1))
    )
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
        elif isinstance(inner, dict):
            yield from ({**value, key: other} for other in _other_rope(inner))
        elif isinstance(inner, float) and key in ("factor", "rope_theta", "partial_rotary_factor"):
            yield from ({**value, key: other} for other in (1.0, 10000.0) if other > inner / 2)
            yield {**value, key: 1.0}
    if "rope_type" in value and value["rope_type"] != "default":
        theta = value.get("rope_theta", 10000.0)
        yield {"rope_type": "default", "rope_theta": theta}


def find_cause(
    name: str, lane: str, device: str, encoding: str, *, limit_seconds: float
) -> dict[str, Any] | None:
    """The first config field whose other value makes the architectures agree."""
    from maxport.twin import default_config, twin_config

    begun = time.perf_counter()
    import transformers

    config = twin_config(default_config(getattr(transformers, name).config_class.model_type), 0)
    values = config.to_dict()
    for key, value in alternatives(values):
        if time.perf_counter() - begun > limit_seconds:
            break
        try:
            row = judge(name, lane, device, encoding, {key: value})
        except Exception:  # the class refuses this value; try the next one
            continue
        if row["verdict"] == "equal":
            return {"field": key, "value": value, "instead_of": values[key], "row": row}
    return None


def explain(row: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Add the config field that the difference comes from, if one is found."""
    where = (arguments.name, arguments.lane, arguments.device, arguments.encoding)
    cause = find_cause(*where, limit_seconds=arguments.cause)
    if cause is None:
        return
    row["cause"] = {key: cause[key] for key in ("field", "value", "instead_of")}
    row["cause"]["max_diff"] = cause["row"]["max_diff"]
    row["why"] += (
        f"; equal (to {cause['row']['max_diff']:.2g}) with {cause['field']} = "
        f"{json.dumps(cause['value'])} instead of {json.dumps(cause['instead_of'])}"
    )


def main() -> None:
    """Print, or write, one row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("lane", choices=("v2", "v3"))
    parser.add_argument("device", choices=("cpu", "gpu"))
    parser.add_argument("encoding", choices=("float32", "bfloat16"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--cause", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    changes = {
        key: json.loads(value) for key, _, value in (s.partition("=") for s in arguments.set)
    }
    warnings.filterwarnings("ignore")
    row = judge(arguments.name, arguments.lane, arguments.device, arguments.encoding, changes)
    if row["verdict"] == "differs" and arguments.cause:
        explain(row, arguments)
    text = json.dumps(row, indent=1)
    if arguments.out:
        arguments.out.write_text(text, "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
