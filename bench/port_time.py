"""How long `maxport port` takes and how much memory, on a small real model and a huge config.

    python bench/port_time.py

SmolLM2-135M-Instruct with its weights, and a config.json of Llama-3.1-405B's shape with none. Each
runs as the command a person runs, in a process of its own, files of the port included.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from maxport.verify.reference import versions

RESULTS = Path(__file__).parent / "results"
#: Allowed seconds, and GB of memory where the target names them.
LIMITS = {"SmolLM2-135M-Instruct": (25.0, None), "Llama-3.1-405B's shape": (30.0, 4.0)}

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def models(folder: Path) -> dict[str, Path]:
    """The checkpoints by the name of their row."""
    from maxport.checkpoint import convert_gguf
    from maxport.demo import model_file

    shape = folder / "llama-405b"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(LLAMA_405B), "utf-8")
    small, huge = LIMITS
    return {small: convert_gguf(model_file()), huge: shape}


def measure(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """One run of the command: seconds, CPU seconds, and the peak memory of any of its processes."""
    command = [
        sys.executable, "-m", "maxport", "port", str(model), "-o", str(folder / "ports"),
        "--slug", f"timed_{len(name)}", "--yes", "--json",
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr.strip() or done.stdout.strip()}")
    limit, memory_limit = LIMITS[name]
    memory = after.ru_maxrss / 2**20
    kept = seconds < limit and (memory_limit is None or memory < memory_limit)
    return {
        "model": name,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
        "peak_gib": round(memory, 2),
        "allowed_seconds": limit,
        "allowed_gib": memory_limit,
        "kept": kept,
        "files": len(json.loads(done.stdout)["files"]),
    }


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        "# Time and memory of `maxport port`",
        "",
        f"{report['machine']}, {report['date']}, load {report['load']} when it began; "
        + ", ".join(f"{k} {v}" for k, v in report["versions"].items())
        + ".",
        "",
        "| model | s | allowed | CPU s | peak GiB | allowed | files | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        lines.append(
            f"| {row['model']} | {row['seconds']} | {row['allowed_seconds']} "
            f"| {row['cpu_seconds']} | {row['peak_gib']} | {row['allowed_gib'] or ''} "
            f"| {row['files']} | {'kept' if row['kept'] else 'missed'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure both and write the table; exit code 1 where a limit is missed."""
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(prefix="maxport-time-") as name:
        folder = Path(name)
        rows = [measure(n, m, folder) for n, m in models(folder).items()]
    report = {
        "machine": f"{os.cpu_count()} cores {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "load": load,
        "versions": versions(),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "port_time.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    text = table(report)
    (RESULTS / "port_time.md").write_text(text, "utf-8")
    print(text)
    sys.exit(0 if all(r["kept"] for r in rows) else 1)


if __name__ == "__main__":
    main()
