"""Runs a built MAX graph on torch, without compiling it.

A graph builds in seconds and compiles in minutes, and many kernels exist on GPUs only. The
evaluator executes the graph itself: V2 or V3, built for CPU, a (virtual) GPU or a mesh of devices.
It checks what the graph says, not how MAX's kernels compute it; the verdict of record is a
compiled run.

Where to look: `decode.py` reads the graph, `program.py` runs it, `ops/` holds one file per family
of graph ops, `kernels/` one file per family of custom kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from max.graph import Graph

from maxport.engine.evaluator.call import KERNELS, OPS
from maxport.engine.evaluator.program import Program, Recorder, Substitutes
from maxport.engine.evaluator.record import Recording

__all__ = ["KERNELS", "OPS", "Program", "Recording", "evaluate"]


def evaluate(
    graph: Graph,
    inputs: Sequence[Any],
    weights: Mapping[str, Any],
    *,
    record: Recorder | None = None,
    substitute: Substitutes | None = None,
) -> list[torch.Tensor]:
    """Execute `graph` once; see `Program.run` for arguments, results and errors.

    Use `Program` to run the same graph several times.
    """
    return Program(graph).run(inputs, weights, record=record, substitute=substitute)
