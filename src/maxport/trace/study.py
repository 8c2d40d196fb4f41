"""Trace a model at two sizes and say what it computes, for every size."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from maxport.emit.graphfile import Origin
from maxport.emit.lift import Lifted, lift
from maxport.emit.ragged import to_ragged
from maxport.emit.spec import FixedKey
from maxport.errors import MaxportError
from maxport.idioms import Finding, recognise
from maxport.ir import Graph
from maxport.trace.capture import Traced, export_model
from maxport.trace.config_access import record_reads
from maxport.trace.fields import field_sources, fixed_keys
from maxport.trace.importer import import_program
from maxport.trace.numeric import TracedValues
from maxport.twin import twin_config, twin_model

#: Sizes traced to tie literals to the configuration; the port is then judged at a third.
SIZES = (0, 1)
#: A further size, whose weights' shapes confirm the expressions found.
CONFIRMED = 2


#: Exports take seconds, and planning a port and making it trace the same twin.
_EXPORTED: dict[str, tuple[Traced, PreTrainedModel]] = {}
_KEPT = 3


@dataclass
class Study:
    """What is known of a model after tracing it.

    Attributes:
        model_class: The transformers class.
        traced: The first twin's graph as traced.
        recognised: The same after recognition.
        lifted: The ragged graph for every size.
        findings: Idioms accepted and refused in the first twin.
        covered: Traced operations that are in proven idioms.
        total: Traced operations.
        plain: Operations emitted one by one, by name.
        origins: Where transformers defines each class.
        ignored: Patterns of checkpoint keys that transformers ignores.
        base_prefix: Prefix that transformers adds to checkpoints saved without the head.
        fixed: Configuration keys that decide what is computed, as the model was traced with.
    """

    model_class: type[PreTrainedModel]
    traced: Graph
    recognised: Graph
    lifted: Lifted
    findings: list[Finding]
    covered: int
    total: int
    plain: dict[str, int]
    origins: dict[str, Origin]
    ignored: list[str]
    base_prefix: str
    fixed: list[FixedKey]


#: The twin traced last: planning a port and making it begin with the same one.
_LAST: dict[str, tuple[Graph, TracedValues, PreTrainedModel]] = {}


def trace_twin(config: PreTrainedConfig) -> tuple[Graph, TracedValues, PreTrainedModel]:
    """One twin's graph as traced, its ground truth, and the model, in bfloat16."""
    source = getattr(config, "_name_or_path", "")
    key = f"{type(config).__module__} {source} {config.to_json_string()}"
    if key not in _LAST:
        model = twin_model(config, dtype=torch.bfloat16)
        traced = export_model(model, twin_model(config))
        graph = import_program(traced)
        _LAST.clear()
        _LAST[key] = graph, TracedValues(traced, graph.aliases), model
    graph, values, model = _LAST[key]
    return _copy(graph), values, model  # recognising changes a graph in place


@contextmanager
def refusing_unknown(config: PreTrainedConfig) -> Iterator[None]:
    """Refuse a model whose trace no rule foresaw, whatever way the rules fail on it.

    Raises:
        MaxportError: In place of any other exception.
    """
    try:
        yield
    except MaxportError:
        raise
    except Exception as error:  # a stranger's model may break any assumption
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "maxport" in f.filename]
        place = f", {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        reason = (str(error).strip().splitlines() or ["no message"])[0][:200]
        raise MaxportError(
            f"maxport has no rule for something that {type(config).__name__}'s model does",
            where=f"{type(error).__name__}: {reason}{place}",
            fix="report the model with its config.json, and what `maxport trace MODEL --stage "
            "traced` shows of it",
        ) from error


def stage_of(
    config: PreTrainedConfig, stage: str, progress: Callable[[str], None] = lambda _: None
) -> tuple[Graph, list[Finding]]:
    """The graph of the first twin as far as `stage`, with the idioms accepted and refused by then.

    Args:
        config: The checkpoint's (text) configuration at its real size.
        stage: `traced`, `recognised`, or `ragged` for the graph that is emitted for every size.
        progress: Called with what is being done.

    Raises:
        MaxportError: The model cannot be brought that far.
    """
    with refusing_unknown(config):
        if stage == "ragged":
            result = study(config, progress=progress)
            return result.lifted.graph, result.findings
        progress("tracing a twin")
        graph, values, _ = trace_twin(twin_config(config, SIZES[0], layers=_layers(config)))
        return graph, recognise(graph, values) if stage == "recognised" else []


def study(
    config: PreTrainedConfig,
    *,
    progress: Callable[[str], None] = lambda _: None,
    window: int | None = None,
) -> Study:
    """Trace `config`'s model at two small sizes.

    Args:
        config: The checkpoint's (text) configuration at its real size.
        progress: Called with what is being done.
        window: Sliding window of the twins, if not the twins' own.

    Raises:
        MaxportError: The model cannot be traced, recognised or lifted.
    """
    layers = _layers(config)
    configs = [twin_config(config, size, window=window, layers=layers) for size in SIZES]
    graphs: list[Graph] = []
    first: Any = None
    for size, twin in zip(SIZES, configs, strict=True):
        progress(f"tracing twin {size + 1} of {len(SIZES)}")
        graph, values, model = trace_twin(twin)
        if first is None:
            before = _copy(graph)
        findings = recognise(graph, values)
        ragged = to_ragged(graph)
        if first is None:
            first = (before, graph, findings, model, ragged)
        graphs.append(ragged)
    progress("tying sizes to the configuration")
    before, recognised, findings, model, ragged = first
    plain: dict[str, int] = {}
    for node in ragged.nodes:
        if not node.proof and node.op != "input":
            plain[node.op] = plain.get(node.op, 0) + 1
    third = twin_config(config, CONFIRMED, window=window, layers=layers)
    deeper = twin_config(config, CONFIRMED, window=window, layers=third.num_hidden_layers + 1)
    # The deeper twin's layers may be of other kinds: only weights outside of them are compared.
    outside = {n: s for n, s in _shapes(deeper).items() if not re.search(r"\.\d+\.", n)}
    lifted = lift(graphs, field_sources([*configs, third, deeper]), [_shapes(third), outside])
    total = recognised.traced
    ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    return Study(
        type(model), before, recognised, lifted, findings, total - sum(plain.values()), total,
        plain, class_origins(recognised), ignored, model.base_model_prefix,
        fixed_keys(config, record_reads(configs[0]).reads),
    )  # fmt: skip


def _shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    return {n: tuple(p.shape) for n, p in twin_model(config).state_dict().items()}


def _layers(config: PreTrainedConfig) -> int | None:
    """Layers to trace: enough that a kind's first layer and a later one are both there."""
    depth = getattr(config, "num_hidden_layers", 0)
    lists = [v for v in config.to_dict().values() if isinstance(v, list) and len(v) == depth > 4]
    kinds = max((len({str(v) for v in values}) for values in lists), default=1)
    return 2 * kinds if kinds > 1 else None


def _copy(graph: Graph) -> Graph:
    from maxport.ir import copy_graph

    return copy_graph(graph)


def class_origins(graph: Graph) -> dict[str, Origin]:
    """File and line of every transformers class that the graph's operations come from."""
    origins: dict[str, Origin] = {}
    for name in {cls for node in graph.nodes for cls in node.classes.values()}:
        module, _, cls = name.rpartition(".")
        found = getattr(sys.modules.get(module), cls, None)
        try:
            line = inspect.getsourcelines(found)[1] if found is not None else 0
            origins[name] = Origin(Path(inspect.getfile(found)).name, line)  # type: ignore[arg-type]
        except (OSError, TypeError):
            continue
    return origins
