"""What MAX makes of a port, found out in its own process (`python -m maxport.engine.port_probe`).

The port is imported by MAX's own function for `--custom-architectures`, looked up as MAX looks it
up, and its graph is built. Every finding is one JSON line in the output file, written before the
next step starts, so that the caller knows which step a crash or an endless loop belongs to.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from maxport.engine.registry import import_serving

#: Steps in order; each is a line `{"step": ..., "state": "begin" | "ok" | "error", ...}`.
STEPS = ("import", "registry", "arch", "weights", "build last", "build all", "build variable")


class Report:
    """The file of JSON lines."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def line(self, step: str, state: str, **facts: Any) -> None:
        """Write one line at once."""
        line = {"step": step, "state": state, "cpu_s": round(time.process_time(), 2), **facts}
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()

    def run(self, step: str, action: Callable[[], Mapping[str, Any]]) -> bool:
        """Write how a step begins and ends; whether it ended well."""
        self.line(step, "begin")
        try:
            facts = action()
        except BaseException as error:
            self.line(step, "error", **describe(error))
            return False
        self.line(step, "ok", **facts)
        return True


def describe(error: BaseException) -> dict[str, Any]:
    """The error's innermost cause, and the last place in the port it passed through."""
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    told = next((e for e in reversed(chain) if str(e).strip()), chain[-1])
    frames = [frame for e in chain for frame in traceback.extract_tb(e.__traceback__)]
    return {
        "error": type(told).__name__,
        "message": " ".join(str(told).split())[:800],
        "frames": [[frame.filename, frame.lineno] for frame in frames],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run all steps; the exit code is 0 unless the arguments are wrong."""
    parser = argparse.ArgumentParser(prog="port_probe", description=__doc__)
    parser.add_argument("port", type=Path)
    parser.add_argument("class_name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="folder with weights; graphs are built if given")
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--encoding", default="float32")
    parser.add_argument("--headers", type=Path, help="JSON: [name, shape] of tensors not loaded")
    parser.add_argument(
        "--modes", default="last,all,variable", help="logits to build for, in order"
    )
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    with options.out.open("w", encoding="utf-8") as out:
        report = Report(out)
        if not report.run("import", lambda: import_as_max_does(options.port)):
            return 0
        report.run("registry", lambda: who_answers(options.port, options.class_name))
        report.run("arch", lambda: {"architectures": architecture_facts(options.port)})
        if options.model is not None:
            build(report, options)
    return 0


def import_as_max_does(port: Path) -> dict[str, Any]:
    """Register the port through MAX's own import; names and file of what was imported."""
    with without_scikit_learn():
        import_serving()
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP

    sys.dont_write_bytecode = True
    before = sorted({*ARCH_LOOKUP.architectures, *ARCH_LOOKUP._lazy_architectures})
    ARCH_LOOKUP.import_custom_architectures([str(port)])
    module = sys.modules[port.name]
    return {
        "file": str(getattr(module, "__file__", "")),
        "names": [str(arch.name) for arch in module.ARCHITECTURES],
        "native": before,
    }


@contextmanager
def without_scikit_learn() -> Iterator[None]:
    """Hide scikit-learn: where installed, transformers loads it for assisted decoding, over 1 s."""
    if "sklearn" in sys.modules:
        yield
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["sklearn"]


def who_answers(port: Path, class_name: str) -> dict[str, Any]:
    """The architecture MAX finds for a checkpoint's class, without and with --prefer-module-v3."""
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP

    ours = sys.modules[port.name].ARCHITECTURES
    answers = {}
    for flag in (False, True):
        tasks = {getattr(arch, "task", None) for arch in ours}
        found = [ARCH_LOOKUP.find(class_name, prefer_module_v3=flag, task=t) for t in tasks]
        answer = next((arch for arch in found if arch is not None), None)
        answers["v3" if flag else "default"] = {
            "name": str(answer.name) if answer is not None else None,
            "port": any(answer is arch for arch in ours),
            "module": str(getattr(answer.pipeline_model, "__module__", "")) if answer else None,
        }
    return answers


def architecture_facts(port: Path) -> list[dict[str, Any]]:
    """What each of the port's architectures registers."""
    facts = []
    for arch in sys.modules[port.name].ARCHITECTURES:
        model = arch.pipeline_model
        facts.append(
            {
                "name": str(arch.name),
                "task": str(getattr(arch.task, "value", arch.task)),
                "default_encoding": str(arch.default_encoding),
                "encodings": sorted(map(str, arch.supported_encodings)),
                "planner": _name(getattr(arch, "memory_planner", None)),
                "batching": _name(arch.batching or getattr(model, "batch_processor_cls", None)),
                "pipeline_model": f"{model.__module__}.{model.__qualname__}",
                "kv_cache": hasattr(arch.config, "construct_kv_params")
                or hasattr(model, "get_kv_params"),
                "adapters": sorted(str(getattr(f, "value", f)) for f in arch.weight_adapters),
                "shared_with": shared_with(arch),
            }
        )
    return facts


def shared_with(arch: Any) -> list[str]:
    """Other registered architectures on the same PipelineModel class, but another batch processor.

    Registering assigns the batch processor on the class, so the last one registered wins for all.
    """
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP

    module = str(arch.pipeline_model.__module__)
    package = module.rpartition(".")[0]
    for name, entries in list(ARCH_LOOKUP._lazy_architectures.items()):
        if any(f"{anchor or ''}{path}".startswith(package) for path, _symbol, anchor in entries):
            ARCH_LOOKUP.materialize(name)
    return sorted(
        str(other.name)
        for other in ARCH_LOOKUP.architectures.values()
        if other is not arch
        and other.pipeline_model is arch.pipeline_model
        and (other.batching is not arch.batching or other.config is not arch.config)
    )


def _name(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "__qualname__", type(value).__name__))


def build(report: Report, options: argparse.Namespace) -> None:
    """Build the graph for every ReturnLogits mode; the weights are looked at on the way."""
    from maxport.engine.build import build_port

    def built(mode: str, *, check_kernels: bool = True) -> dict[str, Any]:
        graph = build_port(
            options.port,
            options.model,
            return_logits=mode,
            device=options.device,
            encoding=options.encoding,
            check_kernels=check_kernels,
        )
        return {"lane": graph.lane, "outputs": list(graph.outputs), "vocab": graph.vocab_size}

    def quickly(mode: str) -> dict[str, Any]:
        """Only the head is another, so the kernel calls of the layers need no second check."""
        try:
            with few_layers():
                return built(mode, check_kernels=False)
        except Exception:  # a port may need all layers; the whole build says what is wrong
            return built(mode)

    first, *others = options.modes.split(",")
    weights: dict[str, Any] = {}
    calls: list[tuple[Any, dict[str, Any]]] = []
    with recorded_weights(weights, calls):
        whole = report.run(f"build {first}", lambda: built(first))
    report.run("weights", lambda: weights)
    if options.headers is not None and calls:
        report.run("names", lambda: adapted_names(options.headers, *calls[0]))
    for mode in others:
        report.run(f"build {mode}", functools.partial(quickly if whole else built, mode))


@contextmanager
def few_layers(count: int = 2) -> Iterator[None]:
    """Graphs are built for a checkpoint's first layers only: a mode of logits is about the head."""
    from maxport.engine import build as builder

    whole = builder._pipeline_config

    def cut(*arguments: Any) -> Any:
        config = whole(*arguments)
        hf = config.model.huggingface_config
        total = hf.num_hidden_layers
        for name, value in list(vars(hf).items()):
            if isinstance(value, list) and len(value) == total:
                setattr(hf, name, value[:count])
        hf.num_hidden_layers = min(count, total)
        return config

    with mock.patch.object(builder, "_pipeline_config", cut):
        yield


@contextmanager
def recorded_weights(
    found: dict[str, Any], calls: list[tuple[Any, dict[str, Any]]]
) -> Iterator[None]:
    """Note both sides of the weights while a port is built, also if its build then fails.

    In `found`, `declared` and `provided` map names to [shape, dtype]: the module's parameters and
    the weights the port hands to it; `changed` names what running the adapter on its own result
    changes. `calls` gets the adapter and the configurations it was given.
    """
    import max.experimental.nn.module as v3
    import max.nn.layer.layer as v2
    import max.pipelines.lib.interfaces.pipeline_model as pipeline_model

    compile_v3, load_v2 = v3.Module.compile, v2.Module.load_state_dict
    parse = pipeline_model.parse_state_dict_from_weights

    def note_compile(self: Any, *inputs: Any, weights: Any = None, **options: Any) -> Any:
        note(found, dict(self.parameters), weights or {})
        return compile_v3(self, *inputs, weights=weights, **options)

    def note_load(self: Any, state_dict: Any, **options: Any) -> Any:
        note(found, self.raw_state_dict(), state_dict)
        return load_v2(self, state_dict, **options)

    def note_parse(config: Any, weights: Any, adapter: Any = None, hf_config: Any = None) -> Any:
        once = parse(config, weights, adapter, hf_config=hf_config)
        if adapter is not None:
            given = {
                "huggingface_config": hf_config or config.model.huggingface_config,
                "pipeline_config": config,
            }
            calls.append((adapter, given))
            found["changed"] = second_run(adapter, once, given)
        return once

    with (
        mock.patch.object(v3.Module, "compile", note_compile),
        mock.patch.object(v2.Module, "load_state_dict", note_load),
        mock.patch.object(pipeline_model, "parse_state_dict_from_weights", note_parse),
    ):
        yield


def note(found: dict[str, Any], declared: Mapping[str, Any], provided: Mapping[str, Any]) -> None:
    """Add a module's parameters and weights; pipelines with several modules add up."""
    found.setdefault("declared", {}).update({n: signature(w) for n, w in declared.items()})
    found.setdefault("provided", {}).update({n: signature(w) for n, w in provided.items()})


def signature(weight: Any) -> list[Any]:
    """[shape, dtype name] of a parameter or weight; shape None where it is no proper shape."""
    from max.graph import Shape

    shape = weight.shape
    if hasattr(weight, "quantization_encoding") and not isinstance(shape, Shape):
        return [None, _dtype(weight)]
    return [[int(dim) for dim in shape], _dtype(weight)]


def _dtype(weight: Any) -> str:
    return str(getattr(weight.dtype, "name", weight.dtype))


class Entry:
    """A converted weight in the form adapters get checkpoint tensors in."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def data(self) -> Any:
        """The tensor."""
        return self.weight


def second_run(adapter: Any, once: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """What running the adapter on its own result changes: names gone or new, values."""
    try:
        twice = adapter({name: Entry(weight) for name, weight in once.items()}, **given)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    names = sorted(set(once) ^ set(twice))
    changed = [n for n in once if once[n] is not twice[n]]
    return names or [n for n in changed if _bits(once[n]) != _bits(twice[n])]


def adapted_names(headers: Path, adapter: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Names the adapter gives to tensors that are known by name and rank only.

    Each is stood for by one number, all different, so that nothing is taken for a copy.
    """
    import numpy as np
    from max.graph.weights import WeightData

    entries = {
        name: Entry(WeightData.from_numpy(np.full([1] * len(shape), at, np.float32), name))
        for at, (name, shape) in enumerate(json.loads(headers.read_text("utf-8")))
    }
    return {"adapted": sorted(adapter(entries, **given))}


def _bits(weight: Any) -> bytes:
    """A digest of a weight's elements."""
    from max.driver import Buffer
    from max.dtype import DType

    buffer = Buffer.from_dlpack(getattr(weight, "data", weight))
    raw = buffer.view(DType.uint8, (buffer.num_elements * buffer.dtype.size_in_bytes,))
    return hashlib.sha256(raw.to_numpy().tobytes()).digest()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # tearing torch and MAX down takes a second and serves nobody
