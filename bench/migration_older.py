"""Architectures of older MAX releases: classified, and every codemod run over them.

The `max` wheels of those releases are downloaded into a cache folder and only their Python sources
are read: nothing of them is installed, imported or kept with this project. What they are rewritten
for is the installed MAX.

    python bench/migration_older.py                    all releases below
    python bench/migration_older.py 25.7.0             one release, again
    python bench/migration_older.py 26.2.0/qwen3       one architecture of it, again
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import platform
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxport.errors import MaxportError
from maxport.migrate import report
from maxport.migrate.classify import classify
from maxport.migrate.run import migrate
from maxport.migrate.sources import Sources, reading_max
from maxport.migrate.target import installed_architectures, open_target

RELEASES = ("25.4.0", "25.7.0", "26.2.0")
RESULTS = Path(__file__).parent / "results"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maxport" / "releases"
TASKS = ("TEXT_GENERATION", "EMBEDDINGS_GENERATION")


def sources_of(release: str) -> Path:
    """The `max` folder of a release, from its wheel's Python files."""
    folder = CACHE / release
    if not (folder / "max").is_dir():
        wheels = folder / "wheel"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", f"max=={release}", "--dest", str(wheels)]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(wheels.glob("max-*.whl"))) as archive:
            names = [n for n in archive.namelist() if n.startswith("max/") and n.endswith(".py")]
            archive.extractall(folder, names)
    return folder / "max"


def tasks_of(target: Any) -> set[str]:
    """Tasks that a target's arch files register."""
    found = set()
    for path in target.files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "task":
                found.add(ast.unparse(node.value).split(".")[-1])
    return found


def rows_of(release: str, names: frozenset[str] = frozenset()) -> Iterator[dict[str, Any]]:
    """One row per text architecture of a release, or of those named."""
    with reading_max(sources_of(release)):
        shared = Sources()
        for name in installed_architectures():
            if names and name not in names:
                continue
            target = open_target(name, shared)
            tasks = tasks_of(target)
            if not tasks & set(TASKS):
                continue
            row = {"name": f"{name} {release}", "release": release, "architecture": name}
            row |= _row(target)
            print(f"{row['name']}: {row['verdict']} {row['why'][:90]}", file=sys.stderr)
            yield row


def _row(target: Any) -> dict[str, Any]:
    start = time.perf_counter()
    row: dict[str, Any] = {"verdict": "error", "why": "", "counts": None, "seconds": {}}
    row["lines"] = sum(len(p.read_bytes().splitlines()) for p in target.files)
    try:
        row["classified"] = classify(target).lane
        result = migrate(target)
    except MaxportError as error:
        row |= {"verdict": "refused", "why": error.what}
    except Exception as error:
        row["why"] = f"{type(error).__name__}: {error}"[:300]
    else:
        row["verdict"] = "nothing to do" if result is None else "rewritten"
        if result is not None:
            row["counts"] = report.counts(result)
            row["syntax_errors"] = [n for n, text in result.files.items() if not _parses(text)]
    row["seconds"] = {"migrate": round(time.perf_counter() - start, 1)}
    return row


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def table(body: dict[str, Any]) -> str:
    """The results as Markdown: a summary per release, then all rows."""
    lines = [
        "# Architectures of older MAX releases",
        "",
        f"Sources of the `max` wheels, rewritten for MAX {body['versions']['max']}; "
        f"{body['made']}. Every architecture that registers a text generation or embedding task.",
        "",
        "| release | architectures | V2 | rewritten | refused | crashed | safe | review | manual |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for release in sorted({r["release"] for r in body["rows"]}):
        rows = [r for r in body["rows"] if r["release"] == release]
        verdicts = Counter(r["verdict"] for r in rows)
        v2 = sum(r.get("classified") == "v2" for r in rows)
        total = Counter[str]()
        for row in rows:
            total.update(row["counts"] or {})
        share = [
            f"{total[k] / max(1, sum(total.values())):.1%}" for k in ("safe", "review", "manual")
        ]
        lines.append(
            f"| {release} | {len(rows)} | {v2} | {verdicts['rewritten']} | {verdicts['refused']} "
            f"| {verdicts['error']} | {' | '.join(share)} |"
        )
    lines += ["", "| architecture | lines | class | safe | review | manual | outcome |"]
    lines += ["|---|---:|---|---:|---:|---:|---|"]
    for row in body["rows"]:
        counts = row["counts"] or {}
        numbers = " | ".join(str(counts.get(k, "")) for k in ("safe", "review", "manual"))
        why = f": {row['why']}" if row["why"] else ""
        lines.append(
            f"| {row['name']} | {row['lines']} | {row.get('classified', '')} | {numbers} "
            f"| {row['verdict']}{why} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES)
    releases = parser.parse_args().releases
    path = RESULTS / "migration_older.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {r["name"]: r for r in old}
    wanted: dict[str, set[str]] = {}
    for text in releases:
        release, _, name = text.partition("/")
        wanted.setdefault(release, set()).update([name] if name else [])
    for release, names in wanted.items():
        for row in rows_of(release, frozenset(names)):
            rows[row["name"]] = row
            save(path, list(rows.values()))


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the JSON and the table made from it."""
    import importlib.metadata as metadata

    body = {
        "bench": "migration_older",
        "made": datetime.date.today().isoformat(),
        "versions": {p: metadata.version(p) for p in ("max", "maxport")},
        "machine": f"{os.cpu_count()} cores {platform.machine().replace('_', '-')}",
        "rows": sorted(rows, key=lambda r: (r["release"], r["architecture"])),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table(body), encoding="utf-8")


if __name__ == "__main__":
    main()
