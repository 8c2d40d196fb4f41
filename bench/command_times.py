"""How long the commands take that must answer at once: those that read headers only, and gates.

    python bench/command_times.py                         inspect, list-keys, check-walls
    python bench/command_times.py ./MODEL ports/my_port   also all gates on a port

The first three read a checkpoint folder of Llama-3-70B's shape, 80 layers in 30 shards, whose files
hold headers and no data. Each command runs five times (gates three times) in a process of its own;
the table has the median. CPU seconds say what it takes on a machine with nothing else to do.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stamp import stamp

from maxport.emit.portdoc import table
from maxport.verify.reference import versions

RESULTS = Path(__file__).parent / "results"
LAYERS, WIDTH, INNER, KV, VOCAB, SHARDS = 80, 8192, 28672, 1024, 128256, 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}
LAYER = {
    "self_attn.q_proj": [WIDTH, WIDTH],
    "self_attn.k_proj": [KV, WIDTH],
    "self_attn.v_proj": [KV, WIDTH],
    "self_attn.o_proj": [WIDTH, WIDTH],
    "mlp.gate_proj": [INNER, WIDTH],
    "mlp.up_proj": [INNER, WIDTH],
    "mlp.down_proj": [WIDTH, INNER],
    "input_layernorm": [WIDTH],
    "post_attention_layernorm": [WIDTH],
}


def checkpoint(folder: Path) -> Path:
    """The 80-layer folder: configuration, index and sparse safetensors files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"model.embed_tokens.weight": [VOCAB, WIDTH], "lm_head.weight": [VOCAB, WIDTH]}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": s for name, s in LAYER.items()}
    shapes["model.norm.weight"] = [WIDTH]
    names = list(shapes)
    where = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]
        header, at = {}, 0
        for name in part:
            size = 2 * shapes[name][0] * (shapes[name][1] if len(shapes[name]) > 1 else 1)
            header[name] = {
                "dtype": "BF16",
                "shape": shapes[name],
                "data_offsets": [at, at := at + size],
            }
            where[name] = file
        body = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(body)) + body)
            stream.truncate(8 + len(body) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def measure(
    name: str, arguments: Sequence[str], allowed: float | None, times: int
) -> dict[str, Any]:
    """Median wall and CPU seconds of a maxport command, or of Python where none is allowed."""
    walls, cpus = [], []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begun = time.monotonic()
        command = [sys.executable, *(["-m", "maxport"] if allowed else []), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        walls.append(time.monotonic() - begun)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if done.returncode not in (0, 1):
            sys.exit(f"{name}: {done.stdout}{done.stderr}")
    wall = statistics.median(walls)
    return {
        "name": name,
        "seconds": round(wall, 2),
        "cpu seconds": round(statistics.median(cpus), 2),
        "allowed": allowed or "",
        "verdict": "" if not allowed else "kept" if wall < allowed else "missed",
    }


def main() -> None:
    """Measure and write bench/results/command_times.*; exit code 1 where a limit is missed."""
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as temp:
        folder = str(checkpoint(Path(temp) / "llama-70b"))
        rows = [
            measure("inspect", ["inspect", folder], 1.0, 5),
            measure("list-keys", ["list-keys", folder, "--summary"], 1.0, 5),
            measure(
                "check-walls",
                ["check-walls", folder, "--device", "cpu", "--device-memory", "400"],
                1.0,
                5,
            ),
        ]
    if len(sys.argv) > 2:
        model, port = sys.argv[1:3]
        rows.append(measure("gates", ["gates", model, "--port-dir", port], 10.0, 3))
        needed = ["-c", "import max.pipelines.lib.arch_lookup"]
        rows.append(measure("import of MAX alone, which gates need", needed, None, 3))
    body = {
        "bench": "command_times",
        "made": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, load {load} before",
        "rows": rows,
    }
    (RESULTS / "command_times.json").write_text(json.dumps(body, indent=2) + "\n")
    text = f"# Command times\n\n{stamp(body)} Median seconds.\n\n"
    text += table(["name", "seconds", "cpu seconds", "allowed", "verdict"], rows) + "\n"
    (RESULTS / "command_times.md").write_text(text)
    print(text)
    sys.exit(1 if any(row["verdict"] == "missed" for row in rows) else 0)


if __name__ == "__main__":
    main()
