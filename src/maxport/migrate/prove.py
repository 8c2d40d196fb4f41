"""Prove that a migrated package computes what the V2 code computes.

The root modules of both generations are built from the same configuration and traced in every
ReturnLogits mode. Their parameters must agree in name, shape and dtype, extras included, and their
graphs must hash equal (see `engine.graphhash` for the normalisations). V2 is the reference, also
where it differs from Hugging Face.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maxport.engine import graphhash
from maxport.errors import MaxportError
from maxport.migrate.kinds import Kinds
from maxport.migrate.parallel_proof import ParallelProof, prove_parallel
from maxport.migrate.plan import Plan
from maxport.migrate.registered import registrations
from maxport.migrate.target import Target
from maxport.migrate.twins import in_bfloat16, variants


@dataclass(frozen=True)
class ModeProof:
    """One ReturnLogits mode: parameters and graphs compared."""

    mode: str
    parameters: int
    parameters_equal: bool
    graphs_equal: bool
    differences: tuple[str, ...]
    normalisations: tuple[str, ...]


@dataclass
class Proof:
    """Outcome of a proof.

    Attributes:
        verdict: `equal`, `differs` or `error`.
        engine: `graph-hash`, or `evaluate` where the graphs hash differently and compute the same.
        architecture: Registered class the twin was made for.
        modes: One entry per ReturnLogits mode.
        max_diff: Largest difference of logits, where the graphs were evaluated.
        encoding: Precision both were built in; bfloat16 only where V2 refuses float32.
        package: `equal` when the whole package, loaded as serving does, builds V2's graph.
        device: `gpu` where V2's root builds there only; a simulated one where there is none.
        package_device: `gpu` where V2's pipeline builds there only; then in bfloat16.
        twin: What V2 asks of a twin beyond transformers' class defaults; mostly nothing.
        why: One sentence where the verdict is not `equal`.
        parallel: The same on two devices, where V2 runs on several; None where it does not.
        seconds: Time by step.
    """

    verdict: str
    engine: str
    architecture: str
    modes: list[ModeProof] = field(default_factory=list)
    why: str = ""
    encoding: str = "float32"
    max_diff: float | None = None
    package: str = ""
    device: str = "cpu"
    package_device: str = "cpu"
    parallel: ParallelProof | None = None
    twin: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """One line for a terminal."""
        names = ", ".join(mode.mode for mode in self.modes)
        if self.verdict == "equal":
            count = self.modes[0].parameters
            whole = f"; package: {self.package}" if self.package else ""
            whole += f"; {self.parallel.summary}" if self.parallel else ""
            place = "" if self.device == "cpu" else f" on a (virtual) GPU in {self.encoding}"
            return f"equal by {self.engine}{place} ({names}); {count} parameters equal{whole}"
        return f"{self.verdict}: {self.why}"

    def to_json(self) -> dict[str, Any]:
        """Plain data for the report."""
        parallel = self.parallel.to_json() if self.parallel else None
        return {**asdict(self), "parallel": parallel, "summary": self.summary}


def prove(plan: Plan, package: Path, class_name: str, twin: Path, *, device: str = "cpu") -> Proof:
    """Build both generations from the twin and compare; imports MAX.

    Args:
        plan: The migration's plan.
        package: Folder of the migrated package.
        class_name: Registered architecture, e.g. `LlamaForCausalLM`.
        twin: Tiny checkpoint of that class.
        device: `cpu`, or `gpu` (virtual where there is none).
    """
    from contextlib import nullcontext

    from maxport.engine import lanes

    proof = Proof("error", "graph-hash", class_name)
    start = time.perf_counter()
    target = plan.target
    try:
        # A copy of an architecture is proven against itself, not against the installed one.
        with nullcontext() if target.installed else lanes.placed(target.package, target.folder):
            case = _Case(
                plan,
                package,
                class_name,
                twin,
                device,
                architecture_of(plan.kinds, target, class_name),
            )
            _prove_root(proof, case)
            if proof.verdict == "equal" and not proof.package and (package / "arch.py").is_file():
                _prove_package(proof, case)
            if proof.verdict == "equal" and plan.parallel and proof.modes[0].mode != "encoder":
                proof.parallel = prove_parallel(
                    class_name, package, case.twin, architecture=case.architecture
                )
    except MaxportError as error:
        proof.why = error.what
    except Exception as error:
        proof.why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    proof.seconds["total"] = round(time.perf_counter() - start, 2)
    return proof


@dataclass
class _Case:
    """What is proven: the migration, its package on disk, and what V2 is built from.

    `added` says what the twin got because V2 refuses it without.
    """

    plan: Plan
    package: Path
    class_name: str
    twin: Path
    device: str
    architecture: Any
    added: str = ""


def architecture_of(kinds: Kinds, target: Target, class_name: str) -> Any:
    """The V2 `SupportedArchitecture` that the target registers under a name; imports MAX.

    Raises:
        MaxportError: it registers none of that name.
    """
    for found in registrations(kinds, target):
        if found.name == class_name:
            return getattr(importlib.import_module(found.module), found.variable)
    raise MaxportError(f"registers no {class_name}", where=str(target.path), code=1)


def _prove_root(proof: Proof, case: _Case) -> None:
    """Compare the root modules of both generations in every mode."""
    from maxport.engine import lanes

    start = time.perf_counter()
    call, proof.encoding = _recorded(case)
    proof.device, proof.twin = call.device, case.added
    proof.seconds["v2"] = round(time.perf_counter() - start, 2)
    if lanes.holds_layers(call):
        _prove_package(proof, case)  # only the pipeline model can construct such a root
        return
    plan = case.plan
    with lanes.imported(case.package) as name:
        module = ".".join([name, *plan.places[plan.root.module]])
        cls = getattr(importlib.import_module(module), plan.root.name)
        proof.modes = [_compare(cls, call, mode) for mode in lanes.modes_of(call)]
    _judge(proof)
    if proof.verdict == "differs" and all(mode.parameters_equal for mode in proof.modes):
        _prove_by_evaluation(proof, case)


def _recorded(case: _Case) -> tuple[Any, str]:
    """V2's root call, in float32 where V2 takes it and else in bfloat16, with that encoding's name.

    Some V2 layers insist on bfloat16, which shows only when they are traced; some architectures
    refuse the CPU, and are recorded on a GPU, a simulated one where there is none; some refuse
    transformers' class defaults, and get a twin closer to published ones.
    """
    refused: dict[str, str] = {}
    for added, twin in variants(case.twin, case.plan, case.class_name):
        for device, encoding in dict.fromkeys(((case.device, "float32"), ("gpu", "bfloat16"))):
            try:
                call = _record(case, twin, device, encoding)
            except MaxportError as error:
                tried = f" ({added} added)" if added else ""
                refused.setdefault(error.what.removeprefix(_REFUSAL), f"{device}{tried}")
                continue
            case.twin, case.added = twin, added
            return _traceable(call, encoding)
    said = "; ".join(f"{place}: {why}" for why, place in refused.items())
    raise MaxportError(f"{_REFUSAL}{said}", where=case.class_name, code=1)


_REFUSAL = "the graph does not build: "


def _record(case: _Case, twin: Path, device: str, encoding: str) -> Any:
    """V2's root call on one device in one precision."""
    from maxport.engine import lanes

    root = case.plan.root
    twin = in_bfloat16(twin) if encoding == "bfloat16" else twin
    same = {"architecture": case.architecture, "device": device, "encoding": encoding}
    return lanes.record_root(root.module, root.name, case.class_name, twin, **same)


def _traceable(call: Any, encoding: str) -> tuple[Any, str]:
    """The call and its encoding; bfloat16 where V2's layers do not trace in float32."""
    from maxport.engine import lanes

    if encoding == "bfloat16" or lanes.holds_layers(call):
        return call, encoding
    try:
        lanes.trace_v2(call, lanes.modes_of(call)[0])
    except Exception:
        call = lanes.in_bfloat16(call)
        lanes.trace_v2(call, lanes.modes_of(call)[0])
        return call, "bfloat16"
    return call, encoding


def _prove_package(proof: Proof, case: _Case) -> None:
    """Load the package as serving does and compare the graph its pipeline model arrives at.

    On the CPU in float32; an architecture that V2 itself does not build there is compared in
    bfloat16 on a GPU, a simulated one where the machine has none.
    """
    try:
        old, new = _both(proof, case, case.device, "float32")
    except Exception as first:
        try:
            old, new = _both(proof, case, "gpu", "bfloat16")
        except Exception as error:
            causes = dict.fromkeys((_short(first), f"on a GPU: {_short(error)}"))
            proof.package = f"error: {'; '.join(causes)}"
            return
        proof.package_device = "gpu"
    diff = graphhash.compare_graphs(old.graph, new.graph)
    missing = sorted(set(old.weights) - set(new.weights))
    found = [*(f"weight {k} missing" for k in missing), *diff.only_first, *diff.only_second]
    if diff.equal and not missing:
        proof.package = "equal"
    else:
        proof.package = "differs: " + "; ".join(found[:3])
        if not missing and old.kv_params is not None:
            _package_by_evaluation(proof, old, new)
    if not proof.modes:
        one, two = (graphhash.hash_graph(graphhash.graph_text(g.graph)) for g in (old, new))
        same = one.weights == two.weights
        proof.modes = [
            ModeProof(
                "package", len(one.weights), same, diff.equal, tuple(found), diff.normalisations
            )
        ]
        _judge(proof)


def _package_by_evaluation(proof: Proof, old: Any, new: Any) -> None:
    """The same for the package alone, in the one mode it was built in."""
    try:
        worst, largest = difference(old, new)
    except Exception as error:
        proof.package += f"; not evaluated: {_short(error)}"
        return
    if worst <= 1e-5 * max(largest, 1.0):
        proof.max_diff = worst
        proof.package = f"equal by evaluation, outputs differ by {worst:.2g} at most"


def _short(error: Exception) -> str:
    if isinstance(error, MaxportError):
        return error.what[:300]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _both(
    proof: Proof, case: _Case, device: str, encoding: str, mode: str = "all"
) -> tuple[Any, Any]:
    """V2's graph and the package's, through both pipeline models."""
    from contextlib import nullcontext

    from maxport.engine import lanes
    from maxport.engine.build import build_native, build_port

    twin = case.twin
    same: dict[str, Any] = {"return_logits": mode, "device": device, "max_length": 128}
    same["encoding"] = encoding
    if encoding == "bfloat16":
        twin = in_bfloat16(case.twin)
    encoder = not proof.modes or proof.modes[0].mode == "encoder"
    with lanes.inputs_unnamed() if encoder else nullcontext():
        old = build_native(case.class_name, twin, lane="v2", architecture=case.architecture, **same)
        return old, build_port(case.package, twin, **same)


def _prove_by_evaluation(proof: Proof, case: _Case) -> None:
    """Let graphs that hash differently count as equal if they compute the same.

    Both packages are built in every ReturnLogits mode and run on the same weights and tokens:
    a ragged prefill, a second chunk and a decode step through the cache. Only the order of float32
    operations may differ: up to 1e-5 of the largest value.
    """
    worst = 0.0
    for mode in ("last", "variable", "all"):
        try:
            old, new = _both(proof, case, case.device, "float32", mode)
        except Exception:
            old, new = _both(proof, case, "gpu", "bfloat16", mode)
            proof.package_device = "gpu"
        found, largest = difference(old, new)
        worst = max(worst, found)
        if not found <= 1e-5 * max(largest, 1.0):
            proof.why += f"; evaluated in mode {mode}, outputs differ by {found:.2g}"
            return
    proof.verdict, proof.engine, proof.max_diff, proof.why = "equal", "evaluate", worst, ""
    proof.package = f"equal by evaluation, outputs differ by {worst:.2g} at most"


_STEPS: list[dict[int, list[int]]] = [
    {0: [3, 5, 7, 11, 13], 1: [2, 4]},
    {0: [19, 23], 1: [8, 9, 10]},
    {0: [17], 1: [6]},
]


def difference(old: Any, new: Any) -> tuple[float, float]:
    """Largest difference between two built graphs' outputs over three steps, and largest value.

    Infinite where outputs differ in name or shape.
    """
    from maxport.engine.runner import EvaluatedRunner

    one, two = EvaluatedRunner(old), EvaluatedRunner(new)
    worst, largest = 0.0, 0.0
    for batch in _STEPS:
        left, right = one.outputs(batch).named, two.outputs(batch).named
        if left.keys() != right.keys():
            return float("inf"), largest
        for key, value in left.items():
            if value.shape != right[key].shape:
                return float("inf"), largest
            worst = max(worst, float(abs(value - right[key]).max()))
            largest = max(largest, float(abs(value).max()))
    return worst, largest


def _judge(proof: Proof) -> None:
    bad = next((m for m in proof.modes if not (m.parameters_equal and m.graphs_equal)), None)
    proof.verdict = "differs" if bad else "equal"
    if bad:
        what = "graphs" if bad.parameters_equal else "parameters"
        proof.why = f"{what} differ in {bad.mode}: {'; '.join(bad.differences[:3])}"


def _compare(cls: type, call: Any, mode: str | None) -> ModeProof:
    from maxport.engine import lanes

    old, new = lanes.trace_v2(call, mode), lanes.trace_v3(cls, call, mode)
    diff = graphhash.compare_graphs(old.graph, new.graph)
    differences = [f"V2 only: {op}" for op in diff.only_first[:8]]
    differences += [f"V3 only: {op}" for op in diff.only_second[:8]]
    for key in sorted(old.parameters.keys() | new.parameters.keys()):
        first, second = old.parameters.get(key), new.parameters.get(key)
        if first != second:
            differences.insert(0, f"parameter {key}: V2 {first}, V3 {second}")
    return ModeProof(
        mode or "encoder",
        len(old.parameters),
        old.parameters == new.parameters,
        diff.equal,
        tuple(differences),
        diff.normalisations,
    )
