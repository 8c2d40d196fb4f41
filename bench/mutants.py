"""Right ports with one fault planted in each: the judge must refuse every one of them.

    python bench/mutants.py                   all rows that bench/results/mutants.json lacks
    python bench/mutants.py helium:eps gemma  these, again
    python bench/mutants.py --table           only write the table anew

Faults that float32 cannot show (the place of a cast) are not planted. The first row of each family
is the port without a fault, which must pass.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stamp import stamp

from maxport.verify.reference import versions

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
GRAPH = "<slug>.py"
NONE = "no fault"
LOOP = "for layer in self.layers:"
GELU = 'F.gelu(self.gate_proj(x), approximate="tanh")'

#: Fault -> (file, text, replacement); the text must be there.
HELIUM = {
    "eps": (GRAPH, "self.weight, self.eps,", "self.weight, 1e-6,"),
    "eps, a half more": (GRAPH, "self.weight, self.eps,", "self.weight, self.eps * 1.5,"),
    "final norm's eps": (
        GRAPH,
        "self.norm = HeliumRMSNorm(config.hidden_size, config.rms_norm_eps)",
        "self.norm = HeliumRMSNorm(config.hidden_size, 1e-6)",
    ),
    "norm weight offset": (GRAPH, "rms_norm(x, self.weight,", "rms_norm(x, self.weight + 1.0,"),
    "norm weight ignored": (GRAPH, "rms_norm(x, self.weight,", "rms_norm(x, self.weight * 0 + 1,"),
    "scale": (GRAPH, "scale=self.head_dim**-0.5", "scale=(self.head_dim + 1) ** -0.5"),
    "scale, no root": (GRAPH, "scale=self.head_dim**-0.5", "scale=1.0 / self.head_dim"),
    "scale from hidden size": (
        GRAPH,
        "scale=self.head_dim**-0.5",
        "scale=(self.head_dim * self.heads) ** -0.5",
    ),
    "no causal mask": (GRAPH, "CAUSAL_MASK", "NULL_MASK"),
    "a sliding window": (
        GRAPH,
        "mask_variant=MHAMaskVariant.CAUSAL_MASK",
        "mask_variant=MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK, local_window_size=140",
    ),
    "rope halves, not pairs": (GRAPH, "interleaved=True", "interleaved=False"),
    "theta": (GRAPH, "theta=config.rope_theta", "theta=10000.0"),
    "theta, one percent": (GRAPH, "theta=config.rope_theta", "theta=config.rope_theta * 1.01"),
    "activation": (GRAPH, "F.silu(gate)", "F.gelu(gate)"),
    "gate and up swapped": (GRAPH, "F.silu(gate) * up", "F.silu(up) * gate"),
    "gate dropped": (GRAPH, "F.silu(gate) * up", "F.silu(gate)"),
    "attention residual dropped": (GRAPH, "x = x + self.self_attn(", "x = self.self_attn("),
    "MLP residual dropped": (GRAPH, "return x + self.mlp(", "return self.mlp("),
    "pre-norm left out": (GRAPH, "self.self_attn(self.input_layernorm(x),", "self.self_attn(x,"),
    "norms exchanged": (
        GRAPH,
        "self.mlp(self.post_attention_layernorm(x))",
        "self.mlp(self.input_layernorm(x))",
    ),
    "parallel layer": (
        GRAPH,
        "        x = x + self.self_attn(self.input_layernorm(x), freqs_cis, kv, row_offsets)\n"
        "        return x + self.mlp(self.post_attention_layernorm(x))",
        "        a = self.self_attn(self.input_layernorm(x), freqs_cis, kv, row_offsets)\n"
        "        return x + a + self.mlp(self.post_attention_layernorm(x))",
    ),
    "final norm left out": (GRAPH, "return self.norm(x)", "return x"),
    "one layer too few": (
        GRAPH,
        "for layer in self.layers:",
        "for layer in list(self.layers)[:-1]:",
    ),
    "layers in reverse": (
        GRAPH,
        "for layer in self.layers:",
        "for layer in list(self.layers)[::-1]:",
    ),
    "one cache for all layers": (GRAPH, "F.constant(self.layer,", "F.constant(0,"),
    "head tied": (GRAPH, "if self.lm_head is None else", "if True else"),
    "embedding multiplied": (
        GRAPH,
        "x = self.embed_tokens(tokens)",
        "x = self.embed_tokens(tokens) * 1.01",
    ),
    "last row off by one": (GRAPH, "row_offsets[1:] - 1", "row_offsets[1:] - 2"),
    "variable rows reversed": (GRAPH, "F.range(n[0], 0, -1,", "F.range(1, n[0] + 1, 1,"),
    "k and v exchanged": (
        "weight_adapters.py",
        '        "model.layers.{i}.self_attn.k_proj.weight",\n'
        '        "model.layers.{i}.self_attn.v_proj.weight",',
        '        "model.layers.{i}.self_attn.v_proj.weight",\n'
        '        "model.layers.{i}.self_attn.k_proj.weight",',
    ),
}
GEMMA = {
    "embedding scale dropped": (GRAPH, " * (self.hidden_size**0.5)", ""),
    "embedding scale, no root": (GRAPH, "(self.hidden_size**0.5)", "(self.hidden_size)"),
    "scale": (GRAPH, "scale=self.head_dim**-0.5", "scale=(self.head_dim + 1) ** -0.5"),
    "keys not rotated": (
        GRAPH,
        "attended = attend(\n            q, k, v,",
        "k = self.k_proj(x).reshape((-1, self.num_key_value_heads, self.head_dim))\n"
        "        attended = attend(\n            q, k, v,",
    ),
    "rope pairs, not halves": (GRAPH, "interleaved=False", "interleaved=True"),
    "theta": (GRAPH, "self.rope_theta = config.rope_theta", "self.rope_theta = 10000.0"),
    "exact GELU": (GRAPH, 'approximate="tanh"', 'approximate="none"'),
    "activation": (GRAPH, GELU, "F.silu(self.gate_proj(x))"),
    "gate and up exchanged": (
        GRAPH,
        'F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)',
        'F.gelu(self.up_proj(x), approximate="tanh") * self.gate_proj(x)',
    ),
    "eps": (GRAPH, "config.rms_norm_eps", "1e-6"),
    "values from keys": (GRAPH, "v = self.v_proj(x)", "v = self.k_proj(x)"),
    "MLP residual dropped": (GRAPH, "return x + self.mlp(", "return self.mlp("),
}
FAULTS = {"helium": HELIUM, "gemma": GEMMA}


def right_port(family: str, folder: Path) -> Path:
    """The family's port without a fault: the hand-written one, or one that maxport writes."""
    if family == "helium":
        return Path(shutil.copytree(ROOT / "tests/fixtures/ports/helium", folder / "helium"))
    from maxport.emit.write import write_port
    from maxport.trace.port import make_port
    from maxport.twin import default_config

    slug = f"port_{family}"
    port = make_port(default_config(family), slug=slug)
    return write_port(folder, slug, port.files, force=True)


def judge(checkpoint: Path, port: Path) -> dict[str, Any]:
    """Verdict and numbers of one port."""
    from maxport.verify import verify_port

    report = verify_port(checkpoint, port, steps=4)
    return {
        "verdict": report.verdict,
        "max_diff": report.max_diff,
        "tolerance": report.tolerance,
        "why": report.why,
        "engine": "evaluate",
        "seconds": {"total": round(report.seconds["total"], 2)},
    }


def rows(family: str, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of one family's faults; a planted text that is not there is an error."""
    from maxport.quiet import quiet
    from maxport.twin import default_config, save_twin, twin_config

    with tempfile.TemporaryDirectory(prefix="maxport-mutants-") as temp:
        folder = Path(temp)
        with quiet():
            config = twin_config(default_config(family), 2)
            checkpoint = save_twin(config, folder / "checkpoint")
            port = right_port(family, folder / "right")
        for fault in wanted:
            target = folder / "edited" / port.name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(port, target)
            row = {"name": f"{family}:{fault}", "expected": "equal" if fault == NONE else "refused"}
            begun = time.monotonic()
            if fault != NONE:
                file, old, new = FAULTS[family][fault]
                path = target / file.replace("<slug>", port.name)
                text = path.read_text("utf-8")
                if old not in text:
                    yield {**row, "verdict": "error", "why": f"{path.name} has no {old!r}"}
                    continue
                path.chmod(0o644)
                path.write_text(text.replace(old, new), "utf-8")
            row |= judge(checkpoint, target)
            row["seconds"]["wall"] = round(time.monotonic() - begun, 2)
            yield row


def right(row: dict[str, Any]) -> bool:
    """Whether the judge decided rightly."""
    refused = row["verdict"] in ("differs", "cannot-load")
    return row["verdict"] == "equal" if row["expected"] == "equal" else refused


def save(found: dict[str, dict[str, Any]]) -> None:
    """Write mutants.json and the table made from it."""
    order = [f"{family}:{fault}" for family in FAULTS for fault in (NONE, *FAULTS[family])]
    ordered = [found[name] for name in order if name in found]
    body = {
        "bench": "mutants",
        "made": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}".replace("_", "-"),
        "rows": ordered,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "mutants.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")
    planted = [row for row in ordered if row["expected"] == "refused"]
    caught = sum(right(row) for row in planted)
    lines = [
        "# Single faults planted in right ports",
        "",
        stamp(body),
        "",
        f"{caught} of {len(planted)} refused; "
        f"{sum(right(r) for r in ordered if r['expected'] == 'equal')} ports without a fault pass.",
        "",
        *families(),
        "| fault | verdict | max diff | tolerance | first difference |",
        "|---|---|---|---|---|",
    ]
    for row in ordered:
        diff = "" if row.get("max_diff") is None else f"{row['max_diff']:.1e}"
        allowed = "" if row.get("tolerance") is None else f"{row['tolerance']:.1e}"
        why = str(row.get("why", "")).replace("|", "/")[:110]
        lines.append(f"| {row['name']} | {row['verdict']} | {diff} | {allowed} | {why} |")
    (RESULTS / "mutants.md").write_text("\n".join(lines) + "\n", "utf-8")


def families() -> list[str]:
    """What the same judge says of the ports of all dense families, which are right."""
    from maxport.verify.tolerance import FLOOR

    path = RESULTS / "families.json"
    if not path.is_file():
        return []
    rows = json.loads(path.read_text("utf-8"))["rows"]
    evaluated = [row for row in rows if row["engine"] == "evaluate"]
    equal = [row for row in evaluated if row["verdict"] == "equal"]
    # That bench allows 2e-5 of the logits' range to every family, so a share of it is one of range.
    shares = [2e-5 * row["max_diff"] / row["tolerance"] for row in equal]
    other = [f"{row['name']} ({row['verdict']})" for row in evaluated if row["verdict"] != "equal"]
    rest = f"; not equal: {', '.join(other)}" if other else ""
    return [
        f"Of the {len(evaluated)} dense families' ports (`families.md`), {len(equal)} are equal "
        f"by evaluation{rest}. The worst of the equal ones differs by {max(shares):.1e} of its "
        f"logits' range; the judge's float32 floor is {FLOOR:.0e} of it, so all of them pass with "
        f"{FLOOR / max(shares):.0f} times what they need.",
        "",
    ]


def main(names: Sequence[str]) -> int:
    """Run the rows asked for, or all that are missing; 1 if the judge was wrong anywhere."""
    path = RESULTS / "mutants.json"
    stored = json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []
    found = {row["name"]: row for row in stored}
    if "--table" in names:
        save(found)
        return 0
    for family, faults in FAULTS.items():
        every = [NONE, *faults]
        asked = [f for f in every if f"{family}:{f}" in names or family in names]
        missing = [f for f in every if f"{family}:{f}" not in found]
        todo = asked if names else missing
        for row in rows(family, todo) if todo else ():
            found[row["name"]] = row
            save(found)
            mark = "ok" if right(row) else "WRONG"
            print(f"{mark:5} {row['name']}: {row['verdict']}", flush=True)
    return 0 if all(right(row) for row in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
