"""Do correct ports pass all gates? The port that `maxport port` emits of every dense family.

    python bench/gates.py                every family that the table lacks
    python bench/gates.py gemma2 cohere  these again

A family is ported from transformers' default configuration without weights, and the gates build
the port on a small random twin. An error is a false alarm; so is a warning that does not say what
it says because the checkpoint has no weights or tokenizer.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from families import DENSE
from stamp import stamp

RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "gates.json"
#: What a folder with a configuration only lacks.
EXPECTED = ("no tokenizer", "no weights")


def row(name: str) -> dict[str, Any]:
    """Port one family and run every gate on the port."""
    from maxport.cli.port import registered_name
    from maxport.emit.write import write_port
    from maxport.gates import run_gates
    from maxport.quiet import quiet
    from maxport.trace.evidence import with_documents
    from maxport.trace.port import make_port
    from maxport.twin import default_config

    with tempfile.TemporaryDirectory() as temp, quiet():
        model = Path(temp) / "model"
        model.mkdir()
        config = default_config(name)
        config.architectures = config.architectures or [_class(name)]
        config.save_pretrained(model)
        class_name = registered_name(config.to_dict())
        port = make_port(config, slug="gated_port", class_name=class_name)
        folder = write_port(Path(temp), "gated_port", with_documents(port, name))
        begun = time.monotonic()
        results = run_gates(str(model), folder)
        seconds = round(time.monotonic() - begun, 1)
    found = [(r.gate, f.level, f.what) for r in results for f in r.findings]
    found += [(r.gate, "error", f"could not look: {r.not_run}") for r in results if r.not_run]
    alarms = [f for f in found if not any(text in f[2] for text in EXPECTED)]
    return {
        "name": name,
        "class": class_name,
        "verdict": "alarm" if alarms else "pass",
        "gates": len(results),
        "seconds": seconds,
        "why": "; ".join(f"{gate} {level}: {what[:200]}" for gate, level, what in alarms),
    }


def _class(name: str) -> str:
    from maxport.checkpoint.known import causal_lm_classes

    return causal_lm_classes()[name]


def main() -> None:
    """Run what is missing, or what is named; exit code 1 where a correct port is not passed."""
    from maxport.verify.reference import versions

    warnings.filterwarnings("ignore")
    rows = {r["name"]: r for r in json.loads(OUT.read_text())["rows"]} if OUT.exists() else {}
    for name in sys.argv[1:] or [n for n in DENSE if n not in rows]:
        rows[name] = row(name)
        print(rows[name], flush=True)
        body: dict[str, Any] = {
            "bench": "gates",
            "made": datetime.date.today().isoformat(),
            "versions": versions(),
            "machine": f"{os.cpu_count()} cores {platform.machine()}",
            "rows": [rows[name] for name in DENSE if name in rows],
        }
        OUT.write_text(json.dumps(body, indent=1) + "\n")
        OUT.with_suffix(".md").write_text(page(body))
    sys.exit(0 if all(r["verdict"] == "pass" for r in rows.values()) else 1)


def page(body: dict[str, Any]) -> str:
    """The table."""
    from maxport.emit.portdoc import table

    rows = body["rows"]
    passed = sum(r["verdict"] == "pass" for r in rows)
    head = f"# Gates on correct ports\n\n{stamp(body)} "
    head += f"{passed} of {len(rows)} emitted ports pass every gate.\n\n"
    return head + table(["name", "class", "verdict", "gates", "why"], rows) + "\n"


if __name__ == "__main__":
    main()
