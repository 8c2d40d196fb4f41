"""`verify_port`: judge a port, or one of MAX's own architectures, against Hugging Face."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from maxport.errors import MaxportError
from maxport.verify.compare import Row, compare, run_probe
from maxport.verify.probes import Probe, Skipped, standard_probes, token_source
from maxport.verify.reference import NoReference, Reference, load_reference, versions
from maxport.verify.report import Report
from maxport.verify.tolerance import Tolerance, derive

TIERS = {
    "smoke": "it builds, loads the weights and computes one short prompt",
    "coherence": "it continues prompts as the reference does, without collapsing",
    "logits": "the logits of all positions are the reference's, however requests are fed",
}
Progress = Callable[[str], None]


@dataclass
class Subject:
    """What is judged and how it is run.

    Attributes:
        folder: Checkpoint folder that the reference reads.
        weights_folder: The same weights in the port's dtype.
        port_dir: The port, None for a native architecture.
        native: Lane of MAX's own architecture, None for a port.
        engine: `evaluate` or `compile`.
        device: `cpu` or `gpu`.
        devices: How many.
        encoding: Working precision.
        max_length: Longest sequence to build for; the checkpoint's limit if None.
        trust_remote_code: Whether the checkpoint's own code may run.
        seconds: Wall time by phase, added to.
    """

    folder: Path
    weights_folder: Path
    port_dir: Path | None
    native: str | None
    engine: str
    device: str
    devices: int
    encoding: str
    max_length: int | None = None
    trust_remote_code: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For titles: the port directory, or MAX's own architecture and its lane."""
        return str(self.port_dir) if self.port_dir else f"MAX's own {self.native}"

    def build(self, mode: str) -> Any:
        """The graph in one ReturnLogits mode; see `maxport.engine.build`."""
        from maxport.engine.build import build_native, build_port, checkpoint_class

        options: dict[str, Any] = {
            "return_logits": mode,
            "device": self.device,
            "devices": self.devices,
            "encoding": self.encoding,
            "max_length": self.max_length,
            "check_kernels": mode == "all",
            "trust_remote_code": self.trust_remote_code,
        }
        begun = time.perf_counter()
        if self.port_dir is not None:
            built = build_port(self.port_dir, self.weights_folder, **options)
        else:
            class_name = checkpoint_class(self.folder)
            lane = str(self.native)
            built = build_native(class_name, self.weights_folder, lane=lane, **options)
        self.add("build", time.perf_counter() - begun)
        return built

    def runners(self, graphs: list[Any], capacity: int) -> list[Any]:
        """Runners for built graphs; compiled ones share one compile."""
        begun = time.perf_counter()
        if self.engine == "compile":
            from maxport.engine.compile import compile_graphs

            runners: list[Any] = list(compile_graphs(graphs, capacity=capacity))
        else:
            from maxport.engine.runner import EvaluatedRunner

            runners = [EvaluatedRunner(graph, capacity=capacity) for graph in graphs]
        self.add("compile" if self.engine == "compile" else "prepare", time.perf_counter() - begun)
        return runners

    def add(self, phase: str, seconds: float) -> None:
        """Add wall time to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def verify_port(
    checkpoint_folder: Path,
    port_dir: Path | None,
    *,
    native: str | None = None,
    engine: str = "evaluate",
    device: str = "cpu",
    devices: int = 1,
    encoding: str = "float32",
    tier: str = "logits",
    steps: int = 48,
    max_positions: int = 1200,
    positions: int | None = None,
    max_length: int | None = None,
    weights: str = "checkpoint",
    model: str = "",
    seed: int = 0,
    trust_remote_code: bool = False,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Judge a port, or MAX's own architecture, against transformers in float32.

    Args:
        checkpoint_folder: Folder with config.json and safetensors weights, real or a twin's.
        port_dir: The port directory; None judges MAX's own architecture in lane `native`.
        native: `v2` or `v3`, only without `port_dir`.
        engine: `evaluate` runs the built graph on torch, `compile` compiles it with MAX.
        device: `cpu`, or `gpu` (simulated for `evaluate` where there is none).
        devices: How many devices the graph spreads over.
        encoding: Working precision of the port.
        tier: `smoke`, `coherence` or `logits`; each includes `smoke`.
        steps: Greedy decode steps.
        max_positions: Longest prompt that is worth its time.
        positions: Longest sequence of the ragged, chunked and decode probes; their own if None.
        max_length: Longest sequence to build for; the checkpoint's own limit if None.
        weights: `checkpoint` or `twin`: what the folder holds, for the report.
        model: How the user named the checkpoint, for the report.
        seed: Of the random prompts.
        trust_remote_code: Whether transformers may run the checkpoint's own code.
        notes: Put at the head of the report's notes.
        progress: Told in a few words what is being done.

    Returns:
        The report; a port that MAX refuses is a verdict, not an exception.

    Raises:
        MaxportError: The arguments make no sense together.
    """
    check_arguments(port_dir, native, engine=engine, tier=tier, encoding=encoding)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="maxport-verify-") as temp:
        subject = Subject(
            Path(checkpoint_folder),
            Path(checkpoint_folder),
            Path(port_dir) if port_dir else None,
            native,
            engine,
            device,
            devices,
            encoding,
            max_length,
            trust_remote_code,
        )
        blank = Report(
            "cannot-judge",
            "",
            subject.name,
            model or str(checkpoint_folder),
            weights,
            engine,
            device,
            encoding,
            tier,
            TIERS[tier],
            versions=versions(),
            seconds=subject.seconds,
        )
        say = progress or (lambda text: None)
        judge = _Judge(subject, blank, steps, max_positions, positions, seed, say)
        judge.notes += notes
        report = judge.run(Path(temp))
    subject.add("total", time.perf_counter() - begun)
    return report


class _Judge:
    """One verdict: load the reference, build, run the tier's checks."""

    def __init__(
        self,
        subject: Subject,
        blank: Report,
        steps: int,
        max_positions: int,
        longest: int | None,
        seed: int,
        progress: Progress,
    ) -> None:
        self.subject, self.blank, self.progress = subject, blank, progress
        self.steps, self.max_positions, self.seed = steps, max_positions, seed
        self.longest = longest
        self.notes: list[str] = []

    def run(self, temp: Path) -> Report:
        """The report, whatever happens along the way."""
        begun = time.perf_counter()
        self.progress("importing MAX")
        from maxport.engine.registry import check_max_version

        check_max_version()
        self.subject.add("import", time.perf_counter() - begun)
        begun = time.perf_counter()
        self.progress("loading the reference")
        try:
            reference = load_reference(
                self.subject.folder, trust_remote_code=self.subject.trust_remote_code
            )
        except NoReference as error:
            return replace(self.blank, verdict="no-reference", why=_line(error))
        self.notes += reference.notes
        self.subject.add("reference", time.perf_counter() - begun)
        try:
            self._match_dtype(temp)
            self.progress("building the graph")
            built = self.subject.build("all")
        except MaxportError as error:
            return self._refused(error)
        try:
            rows = self._rows(built, reference)
        except MaxportError as error:
            verdict = "differs" if error.code == 1 else "cannot-judge"
            return replace(self.blank, verdict=verdict, why=_line(error), notes=tuple(self.notes))
        bad = [row for row in rows if row.verdict == "differs"]
        why = f"{bad[0].name}: {bad[0].why}" if bad else ""
        return replace(
            self.blank,
            verdict="differs" if bad else "equal",
            why=why,
            rows=tuple(rows),
            notes=tuple(self.notes),
        )

    def _refused(self, error: MaxportError) -> Report:
        return replace(self.blank, verdict="cannot-load", why=_line(error), notes=tuple(self.notes))

    def _match_dtype(self, temp: Path) -> None:
        """MAX's own architectures take weights as stored: give them the working dtype."""
        from maxport.verify.dtypes import converted, stored_dtypes

        if self.subject.port_dir is not None:
            return
        stored = stored_dtypes(self.subject.folder)
        if stored <= {self.subject.encoding}:
            return
        if self.subject.encoding not in ("float32", "bfloat16") or not stored <= {
            "float32",
            "bfloat16",
            "float16",
        }:
            return
        self.progress(f"converting the weights to {self.subject.encoding}")
        self.subject.weights_folder = converted(
            self.subject.folder, temp / "checkpoint", self.subject.encoding
        )
        self.notes.append(
            f"weights converted from {', '.join(sorted(stored))} to {self.subject.encoding}"
        )

    def _rows(self, built: Any, reference: Reference) -> list[Row]:
        smoke = self._smoke_probe(reference)
        if self.blank.tier == "smoke":
            (runner,) = self.subject.runners([built], smoke.positions + 128)
            return [self._row(runner, smoke, reference)[0]]
        if self.blank.tier == "coherence":
            from maxport.verify.coherence import coherence_rows

            (runner,) = self.subject.runners([built], 8192)
            rows = [self._row(runner, smoke, reference)[0]]
            return [*rows, *coherence_rows(runner, reference, self.subject.folder, self.progress)]
        return self._logits_rows(built, reference)

    def _logits_rows(self, built: Any, reference: Reference) -> list[Row]:
        self.progress("greedy tokens of the reference")
        begun = time.perf_counter()
        probes, skipped = standard_probes(
            reference.config,
            reference.greedy,
            steps=self.steps,
            max_length=built.max_length,
            max_positions=self.max_positions,
            longest=self.longest,
            seed=self.seed,
        )
        self.subject.add("reference", time.perf_counter() - begun)
        capacity = max(probe.positions for probe in probes) + 1024
        graphs = [built]
        refused: dict[str, MaxportError] = {}
        if self.subject.engine == "compile":  # one compile for all modes
            graphs += self._other_modes(refused)
        runners = self.subject.runners(graphs, capacity)
        rows: list[Row] = []
        known: dict[str, tuple[Mapping[int, np.ndarray], Tolerance]] = {}
        for probe in probes:
            row, judged = self._row(runners[0], probe, reference, known.get("ragged"))
            known[probe.name] = judged
            rows.append(row)
        rows += [_skipped_row(item) for item in skipped]
        if any(row.verdict == "differs" for row in rows):
            return rows
        if self.subject.engine != "compile":
            runners += self.subject.runners(self._other_modes(refused), capacity)
        for runner in runners:
            self.progress(f"ReturnLogits mode {runner.built.return_logits}")
            rows.append(self._mode_row(runner, probes[0], known[probes[0].name]))
        rows += [self._refused_mode(mode, error) for mode, error in refused.items()]
        return rows

    def _row(
        self,
        runner: Any,
        probe: Probe,
        reference: Reference,
        shared: tuple[Mapping[int, np.ndarray], Tolerance] | None = None,
    ) -> tuple[Row, tuple[Mapping[int, np.ndarray], Tolerance]]:
        """The probe's row, with the reference's logits and tolerance for others to use."""
        begun = time.perf_counter()
        if (
            shared is not None
            and shared[0].keys() == probe.sequences.keys()
            and (probe.name == "chunked")
        ):
            expected, tolerance = shared
        else:
            self.progress(f"{probe.name}: reference")
            expected = {key: reference.logits(seq) for key, seq in probe.sequences.items()}
            tolerance = derive(reference, probe.sequences, expected, self.subject.encoding)
        self.subject.add("reference", time.perf_counter() - begun)
        begun = time.perf_counter()
        found = run_probe(runner, probe, self.progress)
        spent = time.perf_counter() - begun
        self.subject.add("run", spent)
        row = compare(probe.name, probe.proves, expected, found, tolerance, seconds=spent)
        return row, (expected, tolerance)

    def _mode_row(
        self, runner: Any, probe: Probe, judged: tuple[Mapping[int, np.ndarray], Tolerance]
    ) -> Row:
        from maxport.verify.modes import check_mode

        begun = time.perf_counter()
        row = check_mode(runner, probe, *judged)
        self.subject.add("run", time.perf_counter() - begun)
        return row

    def _other_modes(self, refused: dict[str, MaxportError]) -> list[Any]:
        """Graphs of the modes other than ALL; what does not build goes to `refused`."""
        graphs = []
        for mode in ("last", "variable"):
            self.progress(f"building the graph for ReturnLogits mode {mode}")
            try:
                graphs.append(self.subject.build(mode))
            except MaxportError as error:
                refused[mode] = error
        return graphs

    def _refused_mode(self, mode: str, error: MaxportError) -> Row:
        """A mode that does not build: a fault of a port, a known gap of MAX's own models."""
        from maxport.verify.modes import PROVES

        verdict = "differs" if self.subject.port_dir else "unsupported"
        return Row(f"logits={mode}", verdict, PROVES[mode], _line(error))

    def _smoke_probe(self, reference: Reference) -> Probe:
        draw = token_source(reference.config, self.seed)
        tokens = draw(12)
        return Probe("smoke", "one short prompt", {0: tokens}, ({0: (0, len(tokens))},))


def _skipped_row(item: Skipped) -> Row:
    return Row(item.name, "not run", "", item.why)


def _line(error: MaxportError) -> str:
    """The error without its fix, for `why`."""
    return f"{error.what} ({error.where})" if error.where else error.what


def check_arguments(
    port_dir: Path | None,
    native: str | None,
    *,
    engine: str = "evaluate",
    tier: str = "logits",
    encoding: str = "float32",
) -> None:
    """Refuse arguments of `verify_port` that make no sense, before any work is done.

    Raises:
        MaxportError: Neither or both of port and native are given, or a value is unknown.
    """
    if (port_dir is None) == (native is None):
        raise MaxportError(
            "say what to judge: a port directory, or MAX's own architecture",
            fix="pass either --port-dir DIR or --native v2|v3",
        )
    allowed = {
        "native": (native, (None, "v2", "v3")),
        "engine": (engine, ("evaluate", "compile")),
        "tier": (tier, tuple(TIERS)),
        "encoding": (encoding, ("float32", "bfloat16", "float16")),
    }
    for name, (value, values) in allowed.items():
        if value not in values:
            known = ", ".join(str(v) for v in values if v)
            raise MaxportError(f"unknown {name} {value!r}", fix=f"use one of {known}")
