"""Known answers: packages that maxport migrated against the variants MAX's engineers wrote by hand.

Both come from the same V2 architecture. Their parameters and graphs are compared for one tiny
checkpoint; what differs is measured, and `NOTES` explains it from both sources.

    python bench/migration_twins.py                 all pairs
    python bench/migration_twins.py olmo2           one pair, again
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from maxport.errors import MaxportError
from maxport.migrate.package import Migrated
from maxport.migrate.run import migrate
from maxport.migrate.target import open_target
from maxport.migrate.twins import in_bfloat16, make_twin
from maxport.migrate.write import write_package

RESULTS = Path(__file__).parent / "results"
PAIRS = {
    "llama3": "LlamaForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mpnet": "MPNetForMaskedLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# What reading both sources says about each difference; shown beside what was measured.
NOTES = {
    "llama3": "V2 sizes the rotary table by hidden_size / num_attention_heads and ignores "
    "config.json's head_dim (llama3.py, create_rope_embedding); the twin takes head_dim, as "
    "Hugging Face does. The migrated package follows V2. Where both sizes agree nothing else "
    "differs.",
    "olmo2": "V2 never hands rms_norm_eps to its attention, so the norms of q and k use the "
    "default 1e-6; the twin hands it on, as Hugging Face does, and also scales by "
    "residual_multiplier, which V2 ignores. The migrated package follows V2.",
    "mpnet": "The same graph.",
    "gemma3": "V2's embedding and head are split over devices by vocabulary and mask what is not "
    "theirs, on one device too; the twin gathers and multiplies plainly. The outputs agree.",
    "gpt_oss": "The twin names the stacked experts by attribute "
    "(_experts_gate_up_proj_weight), the migrated package keeps V2's keys; the twin builds the "
    "rotary table on the GPU and returns last-token logits only, in every mode.",
}
# A checkpoint in which the twins' own corrections of V2 make no difference.
AGREEING = {"rms_norm_eps": 1e-6}


def compare(name: str, class_name: str, result: Migrated) -> dict[str, Any]:
    """One row: keys, graphs and outputs of the migrated package and the hand-written twin."""
    row: dict[str, Any] = {"name": name, "verdict": "error", "why": ""}
    with tempfile.TemporaryDirectory(prefix="maxport-") as folder:
        package = Path(folder) / result.plan.name
        write_package(result.files, package)
        twin = make_twin(class_name, Path(folder) / "twin")
        for device, encoding in (("cpu", "float32"), ("gpu", "bfloat16")):
            checkpoint = twin if encoding == "float32" else in_bfloat16(twin)
            try:
                row |= _compare(class_name, package, checkpoint, device, encoding)
                if row["verdict"] == "differs":
                    plain = agreeing_twin(class_name, Path(folder) / "plain")
                    plain = plain if encoding == "float32" else in_bfloat16(plain)
                    other = _compare(class_name, package, plain, device, encoding)
                    row["agreeing"] = {k: other.get(k) for k in ("verdict", "outputs")}
                break
            except MaxportError as error:
                row["why"] = f"{row['why']} on {device}: {error.what}".strip()[:600]
    return row


def agreeing_twin(class_name: str, folder: Path) -> Path:
    """A tiny checkpoint whose heads fill the hidden size and whose norms use V2's default."""
    from maxport.migrate.twins import model_type_of
    from maxport.twin import default_config, save_twin, twin_config

    config = twin_config(default_config(model_type_of(class_name)))
    config.architectures = [class_name]
    config.head_dim = config.hidden_size // config.num_attention_heads
    for key, value in AGREEING.items():
        setattr(config, key, value)
    return Path(save_twin(config, folder))


def _compare(
    class_name: str, package: Path, twin: Path, device: str, encoding: str
) -> dict[str, Any]:
    from contextlib import nullcontext

    from maxport.engine import graphhash, lanes
    from maxport.engine.build import build_native, build_port

    cached = class_name.endswith("ForCausalLM")
    same: dict[str, Any] = {"device": device, "encoding": encoding, "max_length": 128}
    built = {}
    for mode in ("all", "last"):
        try:
            with nullcontext() if cached else lanes.inputs_unnamed():
                mine = build_port(package, twin, return_logits=mode, **same)
                hand = build_native(class_name, twin, lane="v3", return_logits=mode, **same)
        except MaxportError:
            if mode == "last":
                raise
            continue
        built[mode] = (mine, hand)
    mode, (mine, hand) = next(iter(built.items()))
    texts = [_unprefixed(graphhash.graph_text(g.graph)) for g in (mine, hand)]
    diff = graphhash.compare_graphs(*texts)
    hashes = [graphhash.hash_graph(text) for text in texts]
    ours, theirs = hashes[0].weights, hashes[1].weights
    row: dict[str, Any] = {
        "verdict": "equal" if diff.equal else "differs",
        "engine": "graph-hash",
        "mode": mode,
        "device": device,
        "encoding": encoding,
        "keys": [len(ours), len(theirs)],
        "prefix": sorted({_prefix(k) for k in hand.weights} - {""}),
        "only_migrated": sorted(ours.keys() - theirs.keys()),
        "only_twin": sorted(theirs.keys() - ours.keys()),
        "types_differ": {
            k: [ours[k], theirs[k]] for k in ours.keys() & theirs.keys() if ours[k] != theirs[k]
        },
        "ops_only_migrated": [len(diff.only_first), list(diff.only_first[:4])],
        "ops_only_twin": [len(diff.only_second), list(diff.only_second[:4])],
        "modes_built": sorted(built),
        "why": "",
    }
    if cached:
        row["outputs"] = {m: _evaluated(*pair) for m, pair in built.items()}
    return row


def _prefix(key: str) -> str:
    return "language_model." if key.startswith("language_model.") else ""


def _unprefixed(text: str) -> str:
    """Graph text with the hand-written twins' wrapper left out of weight names."""
    return text.replace('[name = "language_model.', '[name = "')


def _evaluated(mine: Any, hand: Any) -> float | str:
    from maxport.migrate.prove import difference

    try:
        return difference(mine, hand)[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def table(body: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Migrated packages and MAX's hand-written ModuleV3 variants",
        "",
        f"MAX {body['versions']['max']}, {body['made']}. Parameters are counted in the graphs; the "
        "wrapper's `language_model.` in the hand-written variants' names is left out of the "
        "comparison.",
        "",
        "| architecture | compared in | keys migrated / twin | other types | graphs | ops of one "
        "only | outputs differ by | where V2 and twin mean the same | explained |",
        "|---|---|---|---:|---|---|---|---|---|",
    ]
    for row in body["rows"]:
        if "keys" not in row:
            lines.append(f"| {row['name']} | | | | {row['verdict']} | | | | {row['why']} |")
            continue
        only = f"{row['ops_only_migrated'][0]} / {row['ops_only_twin'][0]}"
        keys = f"{row['keys'][0]} / {row['keys'][1]}"
        lines.append(
            f"| {row['name']} | {row['encoding']} on {row['device']} | {keys} "
            f"| {len(row['types_differ'])} | {row['verdict']} | {only} | {_shown(row)} "
            f"| {_shown(row.get('agreeing') or {})} "
            f"| {NOTES.get(row['name'], row['why'])} |"
        )
    return "\n".join(lines) + "\n"


def _shown(row: dict[str, Any]) -> str:
    """Verdict on the graphs, where it stands alone, and the outputs' differences by mode."""
    parts = [f"graphs {row['verdict']}"] if "name" not in row and row else []
    for mode, value in (row.get("outputs") or {}).items():
        text = f"{value:.2g}" if isinstance(value, float) else str(value)
        parts.append(f"{mode}: {'other outputs' if text == 'inf' else text}")
    return "; ".join(parts)


def main() -> None:
    """Run the bench."""
    import importlib.metadata as metadata

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(PAIRS))
    arguments = parser.parse_args()
    path = RESULTS / "migration_twins.json"
    rows = {r["name"]: r for r in json.loads(path.read_text())["rows"]} if path.exists() else {}
    # All source work first: processes are not to be started once MAX is imported.
    migrated = {name: migrate(open_target(name)) for name in arguments.names}
    for name, result in migrated.items():
        assert result is not None
        try:
            rows[name] = compare(name, PAIRS[name], result)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:300]
            rows[name] = {"name": name, "verdict": "error", "why": why}
        print(f"{name}: {rows[name]['verdict']} {rows[name]['why'][:200]}", file=sys.stderr)
        body = {
            "bench": "migration_twins",
            "made": datetime.date.today().isoformat(),
            "versions": {p: metadata.version(p) for p in ("max", "transformers", "maxport")},
            "machine": f"{os.cpu_count()} cores {platform.machine().replace('_', '-')}",
            "rows": [rows[key] for key in sorted(rows)],
        }
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(table(body), encoding="utf-8")


if __name__ == "__main__":
    main()
