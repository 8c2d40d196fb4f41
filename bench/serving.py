"""Serve a port for real, compare it with Hugging Face, and plant faults that compare must name.

Runs of `maxport serve` and `maxport compare`: the port as it is; a checkpoint whose tokenizer has
two tokens swapped; a port whose epsilon is a million times too large; a port whose batches hold
other tokens than asked for; a server that has another checkpoint's norms than the one named.

Example: python bench/serving.py ./SmolLM2-135M-Instruct ports/llama_port -- --devices cpu
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from stamp import stamp

from maxport.emit.portdoc import table
from maxport.errors import MaxportError
from maxport.serving.compare import TEXTS
from maxport.verify.reference import versions

RESULTS = Path(__file__).parent / "results"
MAXPORT = (sys.executable, "-u", "-m", "maxport")
#: Rows and the faults that compare must name in them, no more and no less.
ROWS: dict[str, list[str]] = {
    "right": [],
    "tokenizer": ["tokenizer"],
    "graph": ["graph"],
    "pipeline": ["pipeline"],
    "server": ["server"],
}


def swapped_tokens(model: Path, folder: Path, prompt: str) -> Path:
    """A copy of a checkpoint whose tokenizer gives two of the prompt's tokens each other's id."""
    from transformers import AutoTokenizer

    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    tokenizer = AutoTokenizer.from_pretrained(model)
    first, second = list(dict.fromkeys(tokenizer(prompt)["input_ids"]))[:2]
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    names = {index: word for word, index in vocabulary.items()}
    vocabulary[names[first]], vocabulary[names[second]] = second, first
    path.unlink()
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    return folder


def wrong_epsilon(port: Path, folder: Path) -> Path:
    """A copy of a port whose norms add an epsilon a million times too large."""
    shutil.copytree(port, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "model_config.py"
    text, count = re.subn(r"(\w*eps\w*=hf\.[\w.]+),", r"\1 * 1e6,", path.read_text("utf-8"))
    if not count:
        raise MaxportError("the port's configuration has no epsilon to change", where=str(path))
    path.write_text(text, "utf-8")
    return folder


def wrong_batches(port: Path, folder: Path) -> Path:
    """A copy of a port whose batch processor hands the graph each token's neighbour instead."""
    shutil.copytree(port, folder, ignore=shutil.ignore_patterns("__pycache__"))
    found = re.search(
        r"^from (\S+) import (\w+BatchProcessor)$", (folder / "arch.py").read_text(), re.M
    )
    if found is None:
        raise MaxportError("the port's arch.py imports no batch processor", where=str(port))
    (folder / "shifted.py").write_text(
        f"from max.driver import Buffer\n{found[0]}\n\n\n"
        f"class Shifted({found[2]}):\n"
        "    def _make_inputs(self, *, tokens, **rest):\n"
        "        moved = Buffer.from_numpy(tokens.to_numpy() ^ 1)\n"
        "        return super()._make_inputs(tokens=moved, **rest)\n"
    )
    for name in ("arch.py", "model.py"):
        text = (folder / name).read_text("utf-8")
        (folder / name).write_text(
            text.replace(found[0], f"from .shifted import Shifted as {found[2]}")
        )
    return folder


def other_norms(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose norms are a tenth larger."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            changed = {n: t * 1.1 if t.ndim == 1 else t for n, t in tensors.items()}
            save_file(changed, folder / file.name, metadata={"format": "pt"})
        else:
            (folder / file.name).symlink_to(file.resolve())
    return folder


def run(
    name: str, model: Path, port: Path, reference: Path, options: dict[str, Any]
) -> dict[str, Any]:
    """One row: `maxport serve` of `model` with `port`, `maxport compare` with `reference`."""
    begun = time.monotonic()
    where = ["--port", str(options["port"]), "--port-dir", str(port)]
    serve = [*MAXPORT, "serve", str(model), *where, "--timeout", str(options["timeout"])]
    compare = [*MAXPORT, "compare", str(reference), *where, "--json"]
    compare += ["--max-tokens", str(options["tokens"])]
    if name in ("pipeline", "server"):
        compare.append("--pipeline")
    for prompt in options["prompts"]:
        compare += ["--prompt", prompt]
    with serving([*serve, *options["extra"]]) as answer:
        ready = time.monotonic()
        done = subprocess.run(compare, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise MaxportError(f"compare failed: {done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    gaps = {check["name"]: check for check in report["checks"]}["log probabilities"]
    seconds = {"until the first answer": ready - begun, "compare": time.monotonic() - ready}
    return {
        "name": name,
        "verdict": report["verdict"],
        "faults": report["faults"],
        "max_diff": gaps["max_diff"],
        "tolerance": gaps["tolerance"],
        "engine": "compile-cpu",
        "seconds": {key: round(value, 1) for key, value in seconds.items()},
        "why": "; ".join(c["detail"] for c in report["checks"] if c["verdict"] == "differs"),
        "serve": [line.replace(f"{model.parent}/", "") for line in answer],
        "checks": report["checks"],
    }


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[list[str]]:
    """`maxport serve` from its first answer on; the lines it printed. Ended on leaving."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            if line.startswith("serving;"):
                break
            lines.append(line.rstrip("\n"))
        else:
            raise MaxportError("\n".join(["maxport serve ended:", *lines]))
        yield lines
    finally:
        process.terminate()
        process.wait()


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.argument("port_dir", type=click.Path(path_type=Path, exists=True))
@click.option("--port", default=8125, show_default=True)
@click.option("--tokens", default=256, show_default=True)
@click.option("--timeout", default=1800.0, show_default=True)
@click.option("--prompt", "prompts", multiple=True)
@click.option("--row", "rows", multiple=True, help="Only these.")
@click.argument("extra", nargs=-1)
def main(
    model: Path,
    port_dir: Path,
    port: int,
    tokens: int,
    timeout: float,
    prompts: tuple[str, ...],
    rows: tuple[str, ...],
    extra: tuple[str, ...],
) -> None:
    """Run the rows and write bench/results/serving.json and .md; exit 1 if a fault is not named."""
    options = {"port": port, "tokens": tokens, "timeout": timeout, "extra": extra}
    options["prompts"] = prompts or TEXTS
    results = []
    with tempfile.TemporaryDirectory() as temp:
        for name in rows or tuple(ROWS):
            served, used = model, port_dir
            if name == "tokenizer":
                served = swapped_tokens(model, Path(temp) / "model", options["prompts"][0])
            if name == "server":
                served = other_norms(model, Path(temp) / "other")
            if name == "graph":
                used = wrong_epsilon(port_dir, Path(temp) / port_dir.name)
            if name == "pipeline":
                used = wrong_batches(port_dir, Path(temp) / "shifted" / port_dir.name)
            row = run(name, served, used, model, options)
            named = row["faults"] == ROWS[name]
            results.append({**row, "named": named})
            write(results, model, port_dir)
            click.echo(f"{name}: {row['verdict']} {row['faults']} {row['seconds']}")
    sys.exit(0 if all(row["named"] for row in results) else 1)


def write(rows: list[dict[str, Any]], model: Path, port: Path) -> None:
    """The result files; rows of earlier runs on the same model and port are kept."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "serving.json"
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if (before.get("model"), before.get("port")) == (model.name, port.name):
        known = {row["name"]: row for row in [*before["rows"], *rows]}
        rows = [known[name] for name in ROWS if name in known]
    body = {
        "bench": "serving",
        "made": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}",
        "model": model.name,
        "port": port.name,
        "rows": rows,
    }
    path.write_text(json.dumps(body, indent=2) + "\n")
    columns = ["name", "verdict", "faults", "max_diff", "tolerance", "why"]
    title = f"# Serving {model.name} with {port.name}\n\n{stamp(body)}\n\n"
    (RESULTS / "serving.md").write_text(title + table(columns, rows) + "\n")


if __name__ == "__main__":
    main()
