"""Kernels that MAX 26.7 has on GPUs only, run on a GPU against the evaluator.

Every case is a process of its own: it builds a graph, evaluates it on torch, compiles and executes
it, and compares. A row is written as soon as it is known, so one failure loses nothing else.

    python bench/gpu_kernels.py --jobs 16                  on a machine with a GPU
    python bench/gpu_kernels.py --engine evaluate          anywhere: builds and evaluates only
    python bench/gpu_kernels.py "MoE indices"              one case
    python bench/gpu_kernels.py --merge FILE               rows made elsewhere into bench/results
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
#: Case -> class of transformers, lane or maxport's port, precision.
MODELS = {
    "model: Llama V3": ("LlamaForCausalLM", "v3", "bfloat16"),
    "model: Llama V2": ("LlamaForCausalLM", "v2", "bfloat16"),
    "model: Llama, maxport's port": ("LlamaForCausalLM", "port", "bfloat16"),
    "model: Gemma 3 V3, window 20": ("Gemma3ForCausalLM", "v3", "bfloat16"),
    "model: Gemma 3, maxport's port": ("Gemma3ForCausalLM", "port", "bfloat16"),
    "model: gpt-oss V3": ("GptOssForCausalLM", "v3", "bfloat16"),
    "model: gpt-oss V3 in float32": ("GptOssForCausalLM", "v3", "float32"),
    "model: DeepSeek V3 in V3": ("DeepseekV3ForCausalLM", "v3", "bfloat16"),
    "model: Qwen3-MoE V2": ("Qwen3MoeForCausalLM", "v2", "bfloat16"),
}
ENGINES = {"compile": "compile-gpu", "evaluate": "evaluate"}
#: How many times the evaluator's own bfloat16 rounding a right kernel may differ by.
MULTIPLE = 4.0
#: Smallest tolerance as a share of the largest output: one unit in the last place of bfloat16,
#: or two orders of float32 additions.
FLOORS = {"bfloat16": 2.0**-7, "float32": 2e-5}


def one(name: str, engine: str) -> dict[str, Any]:
    """Run one case in this process; what goes wrong is a verdict."""
    row: dict[str, Any] = {
        "name": name,
        "engine": f"{engine}-gpu" if engine == "compile" else engine,
    }
    seconds: dict[str, float] = {}
    row["seconds"] = seconds
    stage = "build"
    try:
        begun = time.perf_counter()
        subject = model_subject(name) if name in MODELS else kernel_subject(name)
        seconds["build"] = round(time.perf_counter() - begun, 1)
        row["dtype"] = subject.dtype
        row["kernels"] = subject.kernels()
        stage, begun = "evaluate", time.perf_counter()
        expected, wide = subject.evaluated(widen=False), subject.evaluated(widen=True)
        control = subject.evaluated_wrong()
        seconds["evaluate"] = round(time.perf_counter() - begun, 1)
        row |= bounds(expected, wide, control, subject.dtype)
        if engine == "evaluate":
            return {**row, "verdict": "not run", "why": "evaluated only"}
        stage, begun = "compile", time.perf_counter()
        subject.compile()
        seconds["compile"] = round(time.perf_counter() - begun, 1)
        stage, begun = "run", time.perf_counter()
        found = subject.compiled()
        if (by_rows := subject.by_rows()) is not None:
            row["by_rows"] = by_rows
        seconds["run"] = round(time.perf_counter() - begun, 2)
    except Exception as error:
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        text = " ".join(str(error).split())
        text = text if len(text) < 900 else f"{text[:450]} ... {text[-450:]}"
        verdict = "cannot-load" if stage in ("build", "compile") else "error"
        return {**row, "verdict": verdict, "why": f"{stage}: {type(error).__name__}: {text}"}
    return row | judged(expected, found, row)


def bounds(
    expected: Sequence[Any], wide: Sequence[Any], control: Sequence[Any] | None, dtype: str
) -> dict[str, Any]:
    """Per output: tolerance, and how far the nearby wrong computation is away."""
    moves = [gap(a, b) for a, b in zip(expected, wide, strict=True)]
    sizes = [float(a.double().abs().max()) if a.numel() else 0.0 for a in expected]
    allowed = [
        max(MULTIPLE * move, FLOORS[dtype] * size) if a.is_floating_point() else 0.0
        for a, move, size in zip(expected, moves, sizes, strict=True)
    ]
    found: dict[str, Any] = {"tolerances": allowed, "sizes": sizes}
    if control is not None:
        found["control"] = [gap(a, b) for a, b in zip(expected, control, strict=True)]
    return found


def judged(expected: Sequence[Any], found: Sequence[Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Verdict, and the output that comes closest to or furthest past its tolerance."""
    diffs = [gap(a, b) for a, b in zip(expected, found, strict=True)]
    allowed = row["tolerances"]
    worst = max(range(len(diffs)), key=lambda i: (diffs[i] - allowed[i], diffs[i]))
    bad = [i for i, diff in enumerate(diffs) if not diff <= allowed[i]]
    listed = ", ".join(f"output {i} by {diffs[i]:.2g} (allowed {allowed[i]:.2g})" for i in bad)
    return {
        "verdict": "differs" if bad else "equal",
        "max_diff": diffs[worst],
        "tolerance": allowed[worst],
        "diffs": diffs,
        "mean_diff": float((expected[worst].double() - found[worst].double()).abs().mean()),
        "why": listed and f"{listed} of {len(diffs)} outputs",
    }


def gap(a: Any, b: Any) -> float:
    """Largest absolute difference; infinite where shapes differ or a value is not finite."""
    import torch

    if a.shape != b.shape:
        return float("inf")
    difference = (a.double() - b.double()).abs()
    if not torch.isfinite(difference).all():
        return float("inf")
    return float(difference.max()) if difference.numel() else 0.0


def kernel_subject(name: str) -> Any:
    """A case of gpu_cases.py on the first GPU."""
    from gpu_subjects import KernelSubject

    return KernelSubject(name)


def model_subject(name: str) -> Any:
    """A whole model on a random checkpoint."""
    from gpu_subjects import ModelSubject

    return ModelSubject(*MODELS[name])


def names() -> list[str]:
    """All cases, without importing MAX: it simulates GPUs differently from process to process."""
    listing = subprocess.run(
        [sys.executable, "-c", "import gpu_cases; print('\\n'.join(gpu_cases.CASES))"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return [*MODELS, *listing.stdout.splitlines()]


class Store:
    """Rows so far, written after every one."""

    def __init__(self, folder: Path) -> None:
        self.path, self.table = folder / "gpu_kernels.json", folder / "gpu_kernels.md"
        folder.mkdir(parents=True, exist_ok=True)
        old = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {"rows": []}
        self.machine, self.versions = old.get("machine", ""), old.get("versions", {})
        self.rows = {row["name"]: row for row in old["rows"]}
        self._lock = threading.Lock()

    def add(self, row: dict[str, Any], machine: str, used: Mapping[str, str]) -> None:
        """Keep a row, made with the versions `used`, and rewrite both files."""
        with self._lock:
            self.rows[row["name"]] = row
            self.machine, self.versions = machine, dict(used)
            content = {
                "bench": "gpu_kernels",
                "made": datetime.date.today().isoformat(),
                "versions": self.versions,
                "machine": self.machine,
                "rows": list(self.rows.values()),
            }
            for path, text in (
                (self.path, json.dumps(content, indent=1) + "\n"),
                (self.table, table(content)),
            ):
                temp = path.with_suffix(path.suffix + ".new")
                temp.write_text(text, "utf-8")
                temp.replace(path)


def versions() -> dict[str, str]:
    """Versions that results depend on."""
    found = {}
    for name in ("max", "transformers", "torch", "maxport"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from source"
    return found


def table(content: Mapping[str, Any]) -> str:
    """The rows as Markdown."""
    rows = content["rows"]
    counts = {v: sum(r["verdict"] == v for r in rows) for v in sorted({r["verdict"] for r in rows})}
    lines = [
        "# MAX's GPU kernels against the evaluator",
        "",
        "Made by `python bench/gpu_kernels.py`: each graph evaluated on torch, compiled for the "
        "GPU, executed, compared. Tolerance: 4 times the move of the evaluated outputs when "
        "bfloat16 values are carried as float32 (or float32 inputs rounded to TF32), at least a "
        "unit in the last place of the largest output. "
        "Control: how far a nearby wrong computation (a window wider by one, no sinks, gate and up "
        "exchanged ...) is from the right one.",
        "",
        ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        + f"; {content['machine']}.",
        "",
        "; ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".",
        "",
        "| case | verdict | dtype | max diff | tolerance | control | compile s | why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        control = max(row["control"]) if row.get("control") else None
        numbers = [number(v) for v in (row.get("max_diff"), row.get("tolerance"), control)]
        why = row.get("why", "").replace("|", "/")
        if row.get("by_rows"):
            listed = ", ".join(f"{n}: {diff:.2g}" for n, diff in row["by_rows"].items())
            why += f"{why and '; '}one sequence of so many tokens differs by: {listed}"
        lines.append(
            f"| {row['name']} | {row['verdict']} | {row.get('dtype', '')} | "
            f"{' | '.join(numbers)} | {row['seconds'].get('compile', '')} | {why} |"
        )
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    """Two digits, empty for nothing."""
    return "" if value is None else f"{value:.1e}"


def machine(engine: str) -> str:
    """The GPU if one is used, and the host."""
    host = f"{os.cpu_count()} cores {platform.machine()}".replace("_", "-")
    if engine == "evaluate":
        return host
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return host
    return f"1 x {gpu.splitlines()[0]}, {host}"


def in_process(name: str, engine: str, limit: float) -> dict[str, Any]:
    """One case in a child; its death or delay is a row too."""
    with tempfile.TemporaryDirectory(prefix="maxport-gpu-") as temp:
        out = Path(temp) / "row.json"
        command = [sys.executable, __file__, "--one", name, "--engine", engine, "--row", str(out)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            # MAX would reserve most of the GPU for each process.
            "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT": "3",
        }
        begun = time.perf_counter()
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, env=environment
            )
            tail = " ".join((ended.stderr.strip().splitlines() or ["no output"])[-3:])[-600:]
            failure = f"exit code {ended.returncode}: {tail}"
        except subprocess.TimeoutExpired:
            failure = f"took longer than {limit:.0f} s"
        if out.exists():
            row: dict[str, Any] = json.loads(out.read_text("utf-8"))
            return row
    seconds = {"total": round(time.perf_counter() - begun, 1)}
    return {"name": name, "verdict": "error", "why": failure, "seconds": seconds}


def main() -> None:
    """Run the cases that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--engine", choices=["compile", "evaluate"], default="compile")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=500, help="seconds for one case")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--merge", type=Path, help="take over the rows of this gpu_kernels.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        row = one(arguments.one, arguments.engine)
        arguments.row.write_text(json.dumps(row), "utf-8")
        sys.stdout.flush()
        os._exit(0)  # MAX's runtime aborts now and then when a process with a GPU ends
    store = Store(arguments.out)
    if arguments.merge:
        other = json.loads(arguments.merge.read_text("utf-8"))
        for row in other["rows"]:
            store.add(row, other["machine"], other["versions"])
        return
    where = machine(arguments.engine)

    def work(name: str) -> None:
        row = in_process(name, arguments.engine, arguments.limit)
        store.add(row, where, versions())
        print(f"{row['verdict']:12} {name} {row.get('max_diff')} {row['why'][:300]}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for job in [pool.submit(work, name) for name in arguments.names or names()]:
            job.result()


if __name__ == "__main__":
    main()
