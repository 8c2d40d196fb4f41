"""Every text and embedding architecture that MAX registers, V2 and V3, against transformers.

Each row builds one architecture on a twin checkpoint, evaluates the graph, and compares logits with
transformers: `equal`, `differs` (by how much, and which config field removes the difference),
`cannot-load` (MAX's message), or `no-reference` (transformers has no such class).

    python bench/native.py                      all rows that bench/results/native.json lacks
    python bench/native.py Olmo2ForCausalLM     both lanes of one class, again
    python bench/native.py --jobs 16            on a bigger machine
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROW = Path(__file__).with_name("native_row.py")
V3 = "_ModuleV3"
TASKS = ("TEXT_GENERATION", "EMBEDDINGS_GENERATION")

#: Rows that share a process; importing torch, transformers and MAX takes longer than most rows.
BATCH = 3
ROW_SECONDS = 400


def architectures() -> list[tuple[str, str]]:
    """(class name, lane) of every architecture MAX registers that takes text and nothing else."""
    from maxport.engine.registry import native_architecture, native_names

    found = []
    for registered in native_names():
        lane = "v3" if registered.endswith(V3) else "v2"
        name = registered.removesuffix(V3)
        architecture = native_architecture(name, lane)
        modalities = {str(getattr(m, "value", m)) for m in architecture.input_modalities}
        if architecture.task.name in TASKS and modalities <= {"text"}:
            found.append((name, lane))
    return found


def run_batch(rows: list[tuple[str, str]], cause_seconds: float) -> Iterator[dict[str, Any]]:
    """Rows in one process; if it dies, the row it was at is an `error` and the rest go on."""
    todo = list(rows)
    while todo:
        done, failure = run_process(todo, cause_seconds)
        yield from done
        todo = todo[len(done) :]
        if failure and todo:
            name, lane = todo.pop(0)
            yield {"name": f"{name} {lane}", **UNKNOWN, "verdict": "error", "why": failure}


UNKNOWN: dict[str, Any] = {"device": "", "encoding": "", "engine": "evaluate"}


def run_process(
    rows: list[tuple[str, str]], cause_seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """The rows a process finished, and why it did not finish the others."""
    with tempfile.TemporaryDirectory(prefix="maxport-native-") as temp:
        out = Path(temp) / "rows.jsonl"
        command = [sys.executable, str(ROW), *[f"{name}:{lane}" for name, lane in rows]]
        command += ["--out", str(out), "--cause", str(cause_seconds)]
        limit = ROW_SECONDS * len(rows)
        failure = ""
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=limit,
                env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ},
            )
        except subprocess.TimeoutExpired:
            failure = f"took longer than {limit} s"
        else:
            if ended.returncode:
                lines = ended.stderr.strip().splitlines()
                failure = f"exit code {ended.returncode}: {(lines or ['no output'])[-1][:400]}"
        text = out.read_text("utf-8") if out.exists() else ""
    done = [json.loads(line) for line in text.splitlines()]
    if len(done) < len(rows) and not failure:
        failure = "the process ended early"
    return done, failure


class Store:
    """The rows so far, written after every one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "native.json"
        self.table = folder / "native.md"
        folder.mkdir(parents=True, exist_ok=True)
        old = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {"rows": []}
        self.rows: dict[str, dict[str, Any]] = {row["name"]: row for row in old["rows"]}
        self._lock = threading.Lock()

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row and rewrite both files."""
        with self._lock:
            self.rows[row["name"]] = row
            rows = [self.rows[name] for name in sorted(self.rows)]
            content = {
                "bench": "native",
                "made": datetime.date.today().isoformat(),
                "versions": versions(),
                "machine": f"{os.cpu_count()} cores {platform.machine()}",
                "rows": rows,
            }
            replace(self.path, json.dumps(content, indent=1) + "\n")
            replace(self.table, table(rows, content["versions"]))


def replace(path: Path, text: str) -> None:
    """Write beside `path`, then move into place."""
    temp = path.with_suffix(path.suffix + ".new")
    temp.write_text(text, "utf-8")
    temp.replace(path)


def versions() -> dict[str, str]:
    """Versions of what the verdicts depend on."""
    import importlib.metadata

    names = ("max", "transformers", "torch", "maxport")
    return {name: importlib.metadata.version(name) for name in names}


def table(rows: list[dict[str, Any]], used: dict[str, str]) -> str:
    """The rows as Markdown."""
    counts = {v: sum(r["verdict"] == v for r in rows) for v in sorted({r["verdict"] for r in rows})}
    lines = [
        "# MAX's own architectures against transformers",
        "",
        "Made by `make bench-native`: a twin checkpoint per class, the built graph evaluated on "
        "torch, logits of a ragged prefill, chunks and decode steps compared. GPUs are simulated, "
        "and bfloat16 and float8 values are carried as float32, on the same rounded weights as the "
        "reference: what differs is the formula. Where a cause is named in MAX's source, "
        "`bench/native_confirm.py` patched that line and judged again.",
        "",
        ", ".join(f"{name} {version}" for name, version in used.items()) + ".",
        "",
        "; ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".",
        "",
        "| architecture | lane | verdict | built for | max diff | tolerance | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, lane = row["name"].split()
        lines.append(
            f"| {name} | {lane} | {row['verdict']} | {row['device']} {row['encoding']} | "
            f"{_number(row.get('max_diff'))} | {_number(row.get('tolerance'))} | "
            f"{reason(row).replace('|', '/')} |"
        )
    return "\n".join(lines) + "\n"


#: What was found in the sources of MAX and transformers where a row has no numbers.
FOUND = {
    "LagunaForCausalLM v2": "MAX's class is Laguna-M.1's, with a gate per channel "
    "(laguna/layers/attention.py); transformers' LagunaForCausalLM has one per head",
    "Qwen3ForCausalLM v3": "qwen3_embedding_modulev3/model.py reads rope_theta, which transformers "
    "moves to rope_parameters, also where config.json has it as published",
    "DiffusionGemmaForBlockDiffusion v2": "transformers has the class, but there are no "
    "next-token logits: MAX's encoder graph only fills the cache, and its decoder graph returns "
    "statistics of a step on a canvas of noise (diffusion_gemma/diffusion_gemma.py)",
    "Gemma4AssistantForCausalLM v2": "transformers has the class, but it takes another model's "
    "embeddings and keys and values (shared_kv_states) instead of tokens, and MAX registers that "
    "other model's pipeline under this name (gemma4_assistant/arch.py) and builds the assistant "
    "in speculative graphs only",
}


def reason(row: dict[str, Any]) -> str:
    """Why a row has its verdict; with a confirmed cause, that instead of the config it lies in."""
    why = str(row.get("why", ""))
    if row["name"] in FOUND:
        return f"{why.partition(': no tiny twin')[0]}; {FOUND[row['name']]}"
    if row["verdict"] != "differs" or "confirmed" not in row:
        return why
    patched = row["confirmed"]["patched"]
    if patched["verdict"] != "equal":
        return why
    size = why.partition(";")[0]
    return f"{size}. {row['confirmed']['why']}: patched, it is equal (by {patched['max_diff']:.2g})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def main() -> None:
    """Run the rows that are asked for, or missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="class names, optionally NAME:LANE")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cause", type=float, default=120, help="seconds to look for a cause")
    parser.add_argument("--verdict", help="run the rows again that have this verdict")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    store = Store(arguments.out)
    wanted = {name.partition(":")[::2] for name in arguments.names}
    todo = [
        (name, lane)
        for name, lane in architectures()
        if ((name, lane) in wanted or (name, "") in wanted)
        or (not wanted and _missing(store.rows.get(f"{name} {lane}"), arguments.verdict))
    ]
    batches = [todo[start : start + BATCH] for start in range(0, len(todo), BATCH)]
    finished = 0

    def work(batch: list[tuple[str, str]]) -> None:
        nonlocal finished
        for row in run_batch(batch, arguments.cause):
            store.add(row)
            finished += 1
            print(
                f"[{finished}/{len(todo)}] {row['name']}: {row['verdict']} {row['why']}", flush=True
            )

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for job in [pool.submit(work, batch) for batch in batches]:
            job.result()


def _missing(row: dict[str, Any] | None, verdict: str | None) -> bool:
    return row["verdict"] == verdict if row is not None and verdict else row is None


if __name__ == "__main__":
    main()
