"""Every dense family of transformers: ported from a twin, judged at a size that was not traced.

Each family is judged by evaluating its graph; 24 of them also by compiling it on CPU, with sliding
windows of 130 tokens and prompts longer than that.

    python bench/families.py                 all rows that bench/results/families.json lacks
    python bench/families.py llama qwen2     these, again
    python bench/families.py --compiled-only the 24 compiled rows that are missing
    python bench/families.py --jobs 16       on a bigger machine
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
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROW = Path(__file__).with_name("family_row.py")

DENSE = """
apertus arcee bitnet biogpt bloom codegen cohere cohere2 ctrl cwm ernie4_5 exaone4 falcon
gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4 gpt-sw3 gpt2 gpt_bigcode
gpt_neo gpt_neox gpt_neox_japanese gptj granite helium hunyuan_v1_dense hyperclovax jais2
llama ministral ministral3 mistral modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3
openai-gpt opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
vaultgemma xglm
""".split()
COMPILED = """
llama mistral qwen2 qwen3 gemma granite olmo olmo2 phi3 starcoder2 gpt_neox gpt2 opt cohere
stablelm smollm3 helium ernie4_5 glm glm4 exaone4 phi persimmon hunyuan_v1_dense
""".split()
#: Families per process, and graphs per compile.
BATCH, GRAPHS = 8, 8
SECONDS = {False: 900, True: 3000}


def run(names: Sequence[str], *, compiled: bool) -> Iterator[dict[str, Any]]:
    """Rows of some families from one worker process."""
    command = [sys.executable, str(ROW), *(["--compile"] if compiled else []), *names]
    engine = "compile-cpu" if compiled else "evaluate"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS[compiled], check=False
        )
        out, note = done.stdout, done.stderr.strip()[-300:]
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        out, note = raw.decode() if isinstance(raw, bytes) else raw, "took too long"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    yield from rows
    for name in names:
        if name not in {r["name"] for r in rows}:
            yield {"name": name, "engine": engine, "verdict": "error", "why": note, "seconds": {}}


def stored() -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of earlier runs by (family, engine)."""
    path = RESULTS / "families.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text("utf-8"))["rows"]
    return {(r["name"], r["engine"]): r for r in rows}


def save(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write families.json and the table made from it."""
    order = {n: i for i, n in enumerate(DENSE)}
    ordered = sorted(rows.values(), key=lambda r: (r["engine"] != "evaluate", order[r["name"]]))
    used = {p: version(p) for p in ("max", "transformers", "torch", "maxport")}
    machine = f"{os.cpu_count()} cores {platform.machine()}".replace("_", "-")
    body = {
        "bench": "families",
        "made": datetime.date.today().isoformat(),
        "versions": used,
        "machine": machine,
        "rows": ordered,
    }
    RESULTS.mkdir(exist_ok=True)
    for name, text in (
        ("families.json", json.dumps(body, indent=1) + "\n"),
        ("families.md", table(ordered, used, machine)),
    ):
        part = RESULTS / f".{name}.part"
        part.write_text(text, "utf-8")
        part.replace(RESULTS / name)


def table(rows: Sequence[dict[str, Any]], used: dict[str, str], machine: str) -> str:
    """The rows as Markdown."""
    evaluated = [r for r in rows if r["engine"] == "evaluate"]
    compiled = [r for r in rows if r["engine"] == "compile-cpu"]
    shares = [r["coverage"] for r in evaluated if r.get("coverage") is not None]
    apart = max((r.get("evaluated_diff") or 0.0 for r in compiled), default=0.0)
    both = f"; both engines' logits differ by {apart:.1e} of the range at most" if compiled else ""
    average = sum(shares) / max(len(shares), 1)
    lines = [
        "# Dense families, ported and judged",
        "",
        "Made by `make bench-families`; "
        + ", ".join(f"{k} {v}" for k, v in used.items())
        + f"; {machine}.",
        "",
        "Traced at two sizes, judged at a third: prefill, a ragged batch, chunked prefill and 16 "
        "decode steps through the paged cache, against transformers in float32. Tolerance: 2e-5 of "
        "the logit range.",
        "",
        f"- by evaluation: {_equal(evaluated)} of {len(evaluated)} equal",
        f"- compiled on CPU: {_equal(compiled)} of {len(compiled)} equal{both}",
        f"- traced operations in proven idioms: {100 * average:.1f} % on average",
        "",
        "| family | engine | verdict | difference | allowed | in idioms | plain | lines | "
        " trace s | emit s | build s | compile s | run s | why |",
        "|" + "---|" * 14,
    ]
    for r in rows:
        seconds = r.get("seconds", {})
        plain = ", ".join(f"{k} {v}" for k, v in (r.get("plain") or {}).items())
        share = "" if r.get("coverage") is None else f"{100 * r['coverage']:.1f} %"
        cells = [
            r["name"], r["engine"], r["verdict"], _number(r.get("max_diff")),
            _number(r.get("tolerance")), share, plain, str(r.get("lines", "")),
            *(str(seconds.get(k, "")) for k in ("trace", "emit", "build", "compile", "run")),
            r.get("why", "").replace("|", "/").replace("\n", " "),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _equal(rows: Sequence[dict[str, Any]]) -> int:
    return sum(r["verdict"] == "equal" for r in rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--compiled-only", action="store_true")
    parser.add_argument("--evaluated-only", action="store_true")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(DENSE))
    if unknown:
        parser.error(f"no such family: {', '.join(unknown)}")
    rows = stored()
    tasks: list[tuple[list[str], bool]] = []
    for compiled, wanted, size in ((False, DENSE, BATCH), (True, COMPILED, GRAPHS)):
        if (compiled and options.evaluated_only) or (not compiled and options.compiled_only):
            continue
        engine = "compile-cpu" if compiled else "evaluate"
        todo = [
            n for n in wanted if (n in options.names if options.names else (n, engine) not in rows)
        ]
        tasks += [(todo[i : i + size], compiled) for i in range(0, len(todo), size)]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(lambda t: list(run(t[0], compiled=t[1])), task) for task in tasks]
        for future in concurrent.futures.as_completed(futures):
            for row in future.result():
                rows[(row["name"], row["engine"])] = row
                print(row["name"], row["engine"], row["verdict"], row.get("why", ""), flush=True)
            save(rows)
    bad = [r for r in rows.values() if r["verdict"] != "equal"]
    print(f"{len(rows) - len(bad)} of {len(rows)} rows equal")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
