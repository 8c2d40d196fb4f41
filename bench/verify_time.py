"""How long `maxport verify` takes, from the shell's point of view: imports and all.

    python bench/verify_time.py            both rows
    python bench/verify_time.py twin       one of them

The twin is two layers of random weights and the hand-written Helium port; SmolLM2-135M-Instruct is
the real model, 30 layers, in a port that maxport writes. Making checkpoint and port is not timed.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stamp import stamp

from maxport.verify.reference import versions

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
#: Row -> (limit in seconds, what it is, further arguments).
ROWS: dict[str, tuple[float, str, list[str]]] = {
    "twin": (10.0, "Helium, 2 layers, all probes", []),
    "smollm2": (
        60.0,
        "SmolLM2-135M-Instruct, 30 layers, real weights, 64 positions",
        ["--positions", "64"],
    ),
}


def inputs(row: str, folder: Path) -> tuple[Path, Path]:
    """Checkpoint and port of a row."""
    from maxport.twin import default_config, save_twin, twin_config

    if row == "twin":
        port = shutil.copytree(ROOT / "tests/fixtures/ports/helium", folder / "helium")
        config = twin_config(default_config("helium"), 2)
        return save_twin(config, folder / "checkpoint"), Path(port)
    import transformers

    from maxport.checkpoint import convert_gguf
    from maxport.demo import model_file
    from maxport.emit.write import write_port
    from maxport.trace.port import make_port

    checkpoint = convert_gguf(model_file())
    port = make_port(transformers.AutoConfig.from_pretrained(checkpoint), slug="smollm2")
    return checkpoint, write_port(folder, "smollm2", port.files, force=True)


def measure(row: str, folder: Path) -> dict[str, Any]:
    """One run of the command in a process of its own."""
    limit, what, more = ROWS[row]
    checkpoint, port = inputs(row, folder)
    command = [sys.executable, "-m", "maxport", "verify", str(checkpoint)]
    command += ["--port-dir", str(port), "--json", *more]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    base = {"name": row, "what": what, "limit": limit, "engine": "evaluate"}
    try:
        report = json.loads(ended.stdout)
    except ValueError:
        return {**base, "verdict": "error", "why": ended.stderr.strip()[-400:], "seconds": {}}
    seconds = {name: round(value, 2) for name, value in report["seconds"].items()}
    seconds |= {"wall": round(wall, 2), "cpu": round(cpu, 2)}
    positions = sum(probe["positions"] for probe in report["rows"])
    return {
        **base,
        "verdict": report["verdict"],
        "why": report["why"],
        "positions": positions,
        "seconds": seconds,
    }


def save(rows: dict[str, dict[str, Any]]) -> None:
    """Write verify_time.json and the table made from it."""
    ordered = [rows[name] for name in ROWS if name in rows]
    body = {
        "bench": "verify_time",
        "made": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}".replace("_", "-"),
        "rows": ordered,
    }
    (RESULTS / "verify_time.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")
    lines = [
        "# How long a verdict takes",
        "",
        f"{stamp(body)} The whole command on one thread, imports included.",
        "",
        "| model | verdict | positions compared | wall s | cpu s | limit s | phases, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ordered:
        seconds = dict(row["seconds"])
        wall, cpu = seconds.pop("wall", ""), seconds.pop("cpu", "")
        phases = ", ".join(f"{name} {value}" for name, value in seconds.items())
        lines.append(
            f"| {row['what']} | {row['verdict']} | {row.get('positions', '')} | {wall} | {cpu} | "
            f"{row['limit']:.0f} | {phases} |"
        )
    (RESULTS / "verify_time.md").write_text("\n".join(lines) + "\n", "utf-8")


def main(names: list[str]) -> int:
    """Measure the rows asked for, or both; 1 if one is not equal or over its limit."""
    path = RESULTS / "verify_time.json"
    stored = json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []
    rows = {row["name"]: row for row in stored}
    bad = False
    for name in names or ROWS:
        with tempfile.TemporaryDirectory(prefix="maxport-time-") as temp:
            row = measure(name, Path(temp))
        rows[name] = row
        save(rows)
        print(f"{name}: {row['verdict']} {row['seconds']} {row['why']}", flush=True)
        bad |= row["verdict"] != "equal" or row["seconds"]["wall"] > row["limit"]
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
