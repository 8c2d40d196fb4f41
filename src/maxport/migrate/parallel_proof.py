"""Prove that a migrated package computes on two devices what the V2 code computes on two.

Both pipeline models are built for the same two devices, simulated where the machine has fewer, in
every ReturnLogits mode. The graphs must hash equal or, evaluated on the same weights and tokens,
give the same outputs. V2 on two devices is the reference.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maxport.engine import graphhash
from maxport.errors import MaxportError
from maxport.migrate.twins import in_bfloat16

DEVICES = 2
_MODES = {"last": "LAST_TOKEN", "variable": "VARIABLE", "all": "ALL"}


@dataclass
class ParallelProof:
    """Outcome on several devices.

    Attributes:
        verdict: `equal`, `differs`, `error` (V3 does not build) or `cannot-load` (V2 does not).
        devices: How many.
        engine: `graph-hash`, or `evaluate` where a graph hashes differently and computes the same.
        modes: ReturnLogits modes that were found equal.
        max_diff: Largest difference of outputs, where graphs were evaluated.
        encoding: Precision both were built in.
        why: One sentence where the verdict is not `equal`.
        seconds: Time of the proof.
    """

    verdict: str = "error"
    devices: int = DEVICES
    engine: str = "graph-hash"
    modes: list[str] = field(default_factory=list)
    max_diff: float | None = None
    encoding: str = "float32"
    why: str = ""
    seconds: float = 0.0

    @property
    def summary(self) -> str:
        """One phrase for a report."""
        head = f"{self.devices} devices: {self.verdict}"
        if self.verdict != "equal":
            return f"{head}, {self.why}"
        if self.engine == "graph-hash":
            return f"{head} by graph-hash"
        return f"{head} by evaluation, outputs differ by {self.max_diff or 0:.2g} at most"

    def to_json(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {**asdict(self), "summary": self.summary}


def prove_parallel(
    class_name: str,
    package: Path,
    twin: Path,
    *,
    architecture: Any = None,
    modes: Sequence[str] = tuple(_MODES),
) -> ParallelProof:
    """Build both generations on two devices from the twin and compare; imports MAX.

    Args:
        class_name: Registered decoder, e.g. `LlamaForCausalLM`.
        package: Folder of the migrated package.
        twin: Tiny checkpoint of that class.
        architecture: V2's registration, where MAX would not find it by name.
        modes: `last`, `variable`, `all`, or some of them.
    """
    proof = ParallelProof()
    start = time.perf_counter()
    try:
        _prove(proof, class_name, package, twin, architecture, modes)
    except MaxportError as error:
        proof.why = error.what[:300]
    except Exception as error:
        proof.why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    proof.seconds = round(time.perf_counter() - start, 2)
    return proof


def _prove(
    proof: ParallelProof,
    class_name: str,
    package: Path,
    twin: Path,
    architecture: Any,
    modes: Sequence[str],
) -> None:
    from maxport.engine.build import build_native, build_port

    for mode in modes:
        same: dict[str, Any] = {"return_logits": mode, "device": "gpu", "devices": DEVICES}
        same |= {"max_length": 128, "encoding": proof.encoding, "check_kernels": mode == modes[0]}
        try:
            old = build_native(class_name, twin, lane="v2", architecture=architecture, **same)
        except MaxportError as error:
            if proof.encoding == "bfloat16":
                proof.verdict, proof.why = "cannot-load", error.what[:300]
                return
            # Some V2 layers insist on bfloat16.
            proof.encoding, twin = "bfloat16", in_bfloat16(twin)
            same["encoding"] = "bfloat16"
            try:
                old = build_native(class_name, twin, lane="v2", architecture=architecture, **same)
            except MaxportError:
                proof.verdict, proof.why = "cannot-load", error.what[:300]
                return
        new = build_port(package, twin, **same)
        if not _equal(proof, old, new, _MODES[mode]):
            return
        proof.modes.append(_MODES[mode])
    proof.verdict = "equal"


def _equal(proof: ParallelProof, old: Any, new: Any, mode: str) -> bool:
    """Compare two built graphs by hash, then by evaluation; False with the reason noted."""
    from maxport.migrate.prove import difference

    proof.verdict = "differs"
    missing = sorted(set(old.weights) - set(new.weights))
    if missing:
        proof.why = f"weights missing in {mode}: {', '.join(missing[:3])}"
        return False
    if graphhash.compare_graphs(old.graph, new.graph).equal:
        return True
    found, largest = difference(old, new)
    proof.engine, proof.max_diff = "evaluate", max(found, proof.max_diff or 0.0)
    if not found <= 1e-5 * max(largest, 1.0):
        proof.why = f"evaluated in {mode}, outputs differ by {found:.2g}"
        return False
    return True
