"""All V2 architectures of the installed MAX: classified, migrated, proven against V2.

Each row migrates one architecture into a temporary folder, counts the rewrites by safety level, and
compares the V2 and V3 graphs of one tiny twin in every ReturnLogits mode.

    python bench/migration.py                 all rows that bench/results/migration.json lacks
    python bench/migration.py bert llama3     these rows, again
    python bench/migration.py --jobs 16       on a bigger machine
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxport.errors import MaxportError
from maxport.migrate.classify import classify
from maxport.migrate.sources import Sources
from maxport.migrate.target import installed_architectures, open_target

RESULTS = Path(__file__).parent / "results"
#: No row, and no process's source work before its first row, takes longer.
ROW_SECONDS = 1800
SOURCES = Sources()


def v2_names() -> list[str]:
    """Installed architectures that classify as V2, in order of size."""
    shared = Sources()
    found = []
    for name in installed_architectures():
        target = open_target(name, shared)
        if classify(target).lane == "v2":
            lines = sum(len(p.read_bytes().splitlines()) for p in target.files)
            found.append((lines, name))
    return [name for _, name in sorted(found)]


def migrate_row(name: str, types: bool = False) -> tuple[dict[str, Any], Any]:
    """Migrate one architecture; the row so far and the migrated package, None if refused."""
    from maxport.migrate import report
    from maxport.migrate.run import migrate
    from maxport.migrate.twins import registered_names
    from maxport.migrate.typecheck import type_findings

    row: dict[str, Any] = {
        "name": name, "verdict": "error", "max_diff": None, "tolerance": 0.0,
        "engine": "graph-hash", "seconds": {}, "why": "",
    }  # fmt: skip
    start = time.perf_counter()
    target = open_target(name, SOURCES)
    before = {p: p.read_bytes() for p in target.files}
    row["lines"] = sum(len(text.splitlines()) for text in before.values())
    row["classified"] = classify(target).lane
    try:
        result = migrate(target)
    except MaxportError as error:
        return {**row, "verdict": "refused", "why": error.what}, None
    assert result is not None
    row["counts"] = report.counts(result)
    row["root"] = result.plan.root.dotted
    row["carried"] = sum(map(len, result.plan.closure.carried.values()))
    row["registered"] = registered_names(target)
    row["original_unchanged"] = all(p.read_bytes() == text for p, text in before.items())
    row["seconds"]["migrate"] = round(time.perf_counter() - start, 1)
    row |= _compiles(result.files)
    row["again"] = _again(result)
    if types:
        row["types"] = type_findings(result.files, result.plan.name)
    return row, result


def _again(result: Any) -> str:
    """What a second run over the migrated package does: `nothing`, or what it found to do."""
    from maxport.migrate.run import migrate
    from maxport.migrate.write import write_package

    with tempfile.TemporaryDirectory(prefix="maxport-") as folder:
        package = Path(folder) / result.plan.name
        write_package(result.files, package)
        try:
            return "nothing" if migrate(open_target(str(package))) is None else "rewrites"
        except MaxportError as error:
            return error.what


def prove_row(row: dict[str, Any], result: Any) -> dict[str, Any]:
    """Add the proof to a migrated row; imports MAX."""
    if result is None:
        return row
    if not row["registered"]:
        return {**row, "verdict": "no-reference", "why": "registers no architecture of its own"}
    seconds = dict(row["seconds"])
    proofs = {name: _proof(result, name) for name in dict.fromkeys(row["registered"])}
    judged = [p for p in proofs.values() if p["verdict"] != "no-reference"]
    wrong = [p for p in judged if p["verdict"] != "equal"]
    chosen = (wrong or judged or list(proofs.values()))[0]
    row |= chosen
    row["proofs"] = {
        name: [p["verdict"], p.get("engine", ""), p["why"]] for name, p in proofs.items()
    }
    row["parallel"] = {n: p["parallel"] for n, p in proofs.items() if p.get("parallel")}
    total = sum(p.get("seconds", {}).get("total", 0.0) for p in proofs.values())
    row["seconds"] = {**seconds, **row.get("seconds", {}), "total": round(total, 1)}
    return row


def _compiles(files: dict[str, str]) -> dict[str, Any]:
    broken = []
    for shown, text in files.items():
        try:
            compile(text, shown, "exec")
        except SyntaxError as error:
            broken.append(f"{shown}:{error.lineno}")
    return {"syntax_errors": broken}


def _proof(result: Any, registered: str) -> dict[str, Any]:
    from maxport.migrate.prove import prove
    from maxport.migrate.twins import make_twin
    from maxport.migrate.write import write_package

    with tempfile.TemporaryDirectory(prefix="maxport-") as folder:
        try:
            twin = make_twin(registered, Path(folder) / "twin")
        except MaxportError as error:
            return {"verdict": "no-reference", "why": error.what}
        except Exception as error:
            return {
                "verdict": "no-reference",
                "why": f"no twin: {type(error).__name__}: {error}"[:300],
            }
        package = Path(folder) / result.plan.name
        write_package(result.files, package)
        proof = prove(result.plan, package, registered, twin)
    body = proof.to_json()
    verdict = body["verdict"]
    why = body["why"]
    if verdict == "error" and not proof.modes and "v2" not in proof.seconds:
        verdict = "cannot-load"  # V2 itself does not build from the twin
    elif verdict == "error":
        verdict, why = "differs", f"V3 does not trace: {why}"
    return {
        "verdict": verdict,
        "why": why,
        "engine": body["engine"],
        "max_diff": (body["max_diff"] or 0.0) if verdict == "equal" else None,
        "modes": [m["mode"] for m in body["modes"]],
        "parameters": body["modes"][0]["parameters"] if body["modes"] else None,
        "package": body["package"],
        "package_device": body["package_device"],
        "parallel": body["parallel"],
        "seconds": body["seconds"],
        "encoding": body["encoding"],
        "device": body["device"],
        "twin": body["twin"],
    }


def rows_in_worker(names: list[str], types: bool) -> Iterator[dict[str, Any]]:
    """Rows in a process of their own; where it dies or hangs, that row is an `error`."""
    todo = list(names)
    while todo:
        yield from _stream(todo, types)
        if todo:
            yield _failed(todo.pop(0), f"the process died or took over {ROW_SECONDS} s")


def _stream(todo: list[str], types: bool) -> Iterator[dict[str, Any]]:
    """Rows as one process prints them; takes each off `todo`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, *todo, "--inside", *(["--types"] if types else [])]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        timer = threading.Timer(ROW_SECONDS, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"name"'):
                timer.cancel()
                todo.pop(0)
                yield json.loads(line)
                timer = threading.Timer(ROW_SECONDS, process.kill)
                timer.start()
        timer.cancel()


def _failed(name: str, why: str) -> dict[str, Any]:
    return {
        "name": name, "verdict": "error", "max_diff": None, "tolerance": 0.0,
        "engine": "graph-hash", "seconds": {}, "why": why, "classified": "v2",
    }  # fmt: skip


def save(rows: dict[str, dict[str, Any]], machine: str) -> None:
    """Write the JSON and the table made from it, each in whole."""
    import importlib.metadata as metadata

    versions = {p: metadata.version(p) for p in ("max", "transformers", "torch", "maxport")}
    body = {
        "bench": "migration",
        "made": datetime.date.today().isoformat(),
        "versions": versions,
        "machine": machine,
        "rows": [rows[name] for name in sorted(rows)],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    for path, text in (
        (RESULTS / "migration.json", json.dumps(body, indent=1) + "\n"),
        (RESULTS / "migration.md", table(body)),
    ):
        temporary = path.with_suffix(path.suffix + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def several_devices(name: str) -> bool:
    """Whether V2 registers the architecture for several GPUs."""
    for path in open_target(name, SOURCES).files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "multi_gpu_supported":
                return ast.unparse(node.value) == "True"
    return False


def on_two(row: dict[str, Any]) -> str:
    """The tensor-parallel column: what the package does on two devices, where V2 takes several."""
    if not several_devices(row["name"]):
        return ""
    if "parallel" not in row:
        return "in V2 only"
    found = row["parallel"]
    if not found:
        return "rewritten, not proven"
    phrases: dict[str, list[str]] = {}
    for name, proof in found.items():
        phrases.setdefault(proof["summary"], []).append(name)
    if len(phrases) == 1:
        return next(iter(phrases)).replace("|", "/")[:120]
    told = (f"{', '.join(names)}: {phrase}" for phrase, names in phrases.items())
    return "; ".join(told).replace("|", "/")[:240]


def table(body: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = body["rows"]
    proven = [r for r in rows if r["verdict"] == "equal"]
    whole = [r for r in proven if str(r.get("package")).startswith("equal")]
    again = sum(r.get("again") == "nothing" for r in rows)
    untouched = sum(bool(r.get("original_unchanged")) for r in rows)
    together = [
        r
        for r in rows
        if (found := r.get("parallel")) and all(p["verdict"] == "equal" for p in found.values())
    ]
    v2 = sum(r.get("classified") == "v2" for r in rows)
    lines = [
        "# V2 to ModuleV3",
        "",
        f"MAX {body['versions']['max']}, {body['machine']}, {body['made']}. "
        f"{v2} of {len(rows)} classified V2; {len(proven)} proven equal with no hand edits, "
        f"{len(whole)} of them as a whole package, loaded as serving does. "
        f"{again} of {len(rows)} are left alone by a second run, {untouched} originals unchanged. "
        "Seconds: rewriting and proof together, on one core that other work may share. "
        f"Where V2 registers several GPUs, tensor parallelism is kept: {len(together)} are proven "
        "on a mesh of two simulated GPUs too, in every ReturnLogits mode, against V2 on two.",
        "",
        "| architecture | V2 lines | safe | review | manual | verdict | by | modes | package "
        "| mypy | tensor parallel | seconds | why |",
        "|---|---:|---:|---:|---:|---|---|---|---|---:|---|---:|---|",
    ]
    for row in rows:
        found = row.get("counts") or {}
        numbers = " | ".join(str(found.get(k, "")) for k in ("safe", "review", "manual"))
        why = str(row.get("why", "")).replace("|", "/").replace("\n", " ")[:160]
        package = str(row.get("package", "")).replace("|", "/")[:60]
        modes = ", ".join(row.get("modes") or [])
        seconds = row["seconds"].get("migrate", 0) + row["seconds"].get("total", 0)
        types = "" if row.get("types") is None else len(row["types"])
        proofs = row.get("proofs", {}).items()
        names = [n for n, (verdict, *_) in proofs if verdict == "equal"]
        engines = sorted({engine for _, (verdict, engine, _) in proofs if verdict == "equal"})
        verdict = f"{row['verdict']}: {', '.join(names)}" if names else row["verdict"]
        by = ", ".join(engines) + (" on a virtual GPU" if row.get("device") == "gpu" else "")
        if names and row.get("twin"):
            why = f"twin with {row['twin']}"
        several = on_two(row)
        lines.append(
            f"| {row['name']} | {row.get('lines', '')} | {numbers} | {verdict} | {by} | {modes} "
            f"| {package} | {types} | {several} | {seconds:.0f} | {why} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architecture folders; all V2 ones if none")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--types", action="store_true", help="mypy's findings too")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        # All source work first: processes are not to be started once MAX is imported.
        for row, result in [migrate_row(name, arguments.types) for name in arguments.names]:
            print(json.dumps(prove_row(row, result)), flush=True)
        return
    path = RESULTS / "migration.json"
    rows = {r["name"]: r for r in json.loads(path.read_text())["rows"]} if path.exists() else {}
    names = arguments.names or [n for n in v2_names() if n not in rows]
    machine = f"{os.cpu_count()} cores {platform.machine().replace('_', '-')}"
    chunks = [names[i :: arguments.jobs] for i in range(arguments.jobs)]
    lock = threading.Lock()

    def run(chunk: list[str]) -> None:
        for row in rows_in_worker(chunk, arguments.types):
            with lock:
                rows[row["name"]] = row
                save(rows, machine)
            print(f"{row['name']}: {row['verdict']} {row.get('why', '')[:120]}", file=sys.stderr)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, [chunk for chunk in chunks if chunk]))


if __name__ == "__main__":
    main()
