"""Ports of configurations other than their family's own: flags that change what is computed.

Published checkpoints of a family set them: biases, norms of queries and keys, parallel layers,
windows, shares of the head that are rotated. Each is ported and judged as in `families.py`.

    python bench/variants.py               all rows that bench/results/variants.json lacks
    python bench/variants.py falcon cohere all variants of these, again
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from family_row import LENGTHS, build, finish, make, refused
from stamp import stamp

RESULTS = Path(__file__).parent / "results"
#: Family and changes to its class's default configuration.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 96}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    ("llama", {"hidden_act": "relu", "num_key_value_heads": 1}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 16}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    ("gemma3_text", {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}),
    ("phi", {"partial_rotary_factor": 0.25, "qk_layernorm": True}),
    ("phi", {"partial_rotary_factor": 1.0}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
    ("falcon", {"alibi": True, "parallel_attn": False, "bias": True, "multi_query": False}),
    (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 8,
            "num_attention_heads": 128,
            "hidden_size": 8192,
        },
    ),
    ("falcon", {"parallel_attn": False}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 512}),
    ("opt", {"enable_bias": False, "activation_function": "gelu"}),
    ("gpt_bigcode", {"multi_query": False}),
    ("cohere", {"use_qk_norm": True, "attention_bias": True, "num_key_value_heads": 8}),
    ("olmo", {"clip_qkv": 8.0}),
    ("olmo2", {"attention_bias": True}),
    ("starcoder2", {"use_bias": False, "sliding_window": None}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"}),
    ("gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    ("nemotron", {"partial_rotary_factor": 1.0, "attention_bias": True, "mlp_bias": True}),
    ("persimmon", {"qk_layernorm": False}),
    ("glm", {"attention_bias": False, "partial_rotary_factor": 0.25}),
    ("mistral", {"sliding_window": None, "head_dim": 160}),
    ("mistral", {"sliding_window": 4096}),
    ("ministral3", {"sliding_window": 4096}),
    ("smollm3", {"no_rope_layer_interval": 3}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 32}),
    (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015,
            "attention_bias": True,
        },
    ),
    ("biogpt", {"scale_embedding": False}),
    ("xglm", {"scale_embedding": False}),
    ("ernie4_5", {"use_bias": True}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": None}),
    ("apertus", {"attention_bias": True}),
    ("codegen", {"rotary_dim": 16}),
    ("mpt", {"no_bias": False}),
    ("vaultgemma", {"attn_logit_softcapping": None}),
    ("helium", {"attention_bias": True, "mlp_bias": True}),
    ("modernbert-decoder", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    ("gpt_neo", {"attention_types": [[["global"], 24]]}),
    ("hunyuan_v1_dense", {"attention_bias": True}),
    ("nanochat", {"attention_bias": True}),
    ("arcee", {"attention_bias": True, "mlp_bias": True}),
]


def title(name: str, changes: dict[str, Any]) -> str:
    """A variant's name: the family and what is changed."""
    said = {
        k: f"all {v[0]}" if isinstance(v, list) and len(v) > 9 else v for k, v in changes.items()
    }
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in said.items())


def judge(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """One row; whatever goes wrong is its verdict."""
    from transformers import CONFIG_MAPPING

    from maxport.engine.runner import EvaluatedRunner

    with tempfile.TemporaryDirectory(prefix="maxport-families-") as temp:
        try:
            config = CONFIG_MAPPING[name](**changes)
            config.is_decoder = True
            family = make(name, Path(temp), window=None, config=config)
            build(family)
            row = finish(family, EvaluatedRunner(family.built), "evaluate", LENGTHS)
        except Exception as error:
            row = refused(name, "evaluate", error)
    return {**row, "name": title(name, changes)}


def save(rows: dict[str, dict[str, Any]]) -> None:
    """Write variants.json and the table made from it."""
    from maxport.verify.reference import versions

    ordered = [rows[t] for t in (title(*v) for v in VARIANTS) if t in rows]
    body = {
        "bench": "variants",
        "made": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}",
        "rows": ordered,
    }
    equal = sum(row["verdict"] == "equal" for row in ordered)
    lines = [
        "# Other configurations of the dense families",
        "",
        f"{stamp(body)} {equal} of {len(ordered)} ported and equal by evaluation.",
        "",
        "| variant | verdict | difference | allowed | in idioms | why |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in ordered]
    (RESULTS / "variants.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")
    (RESULTS / "variants.md").write_text("\n".join(lines) + "\n", "utf-8")


def _line(row: dict[str, Any]) -> str:
    numbers = ["" if v is None else f"{v:.1e}" for v in (row.get("max_diff"), row.get("tolerance"))]
    share = "" if row.get("coverage") is None else f"{100 * row['coverage']:.1f} %"
    why = row.get("why", "").replace("|", "/").replace("\n", " ")
    return "| " + " | ".join([row["name"], row["verdict"], *numbers, share, why]) + " |"


def wanted(names: list[str], stored: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Variants of the families named, else those without a row."""
    for name, changes in VARIANTS:
        if name in names if names else title(name, changes) not in stored:
            yield name, changes


def main(names: list[str]) -> int:
    """Run what is asked for; 1 if a port that was made differs."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = RESULTS / "variants.json"
    stored = json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []
    rows = {row["name"]: row for row in stored}
    for name, changes in wanted(names, rows):
        row = judge(name, changes)
        rows[row["name"]] = row
        print(f"{row['verdict']:8} {row['name']} {row['why'][:200]}", flush=True)
        save(rows)
    return int(any(row["verdict"] in ("differs", "error") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
