"""The Python line that built an op.

MAX notes it when source tracebacks are on while the graph is built
(`InferenceSession.debug.source_tracebacks = True`); without them there is no line to report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from max import mlir
from max._core import graph as _graph
from max.graph import Graph

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# Frames inside MAX's graph library say how an op is made, not who asked for it.
_LIBRARY = re.compile(r"/max/(graph|experimental/functional|experimental/tensor|nn/kernels|tree)")


def source_line(graph: Graph, index: int) -> str:
    """File, line and function that asked for op number `index`; empty if it was not noted."""
    bytecode = _graph.source_locations_bytecode(graph._module)
    module = mlir.Module.parse(bytecode, graph._module.context)
    for number, operation in enumerate(_walk(module.operation)):
        if number == index:
            return _caller(str(operation.location))
    return ""


def _walk(module: Any) -> Iterator[Any]:
    """Ops in the order in which `decode` numbers them."""
    for operation in module.regions[0].blocks[0].operations:
        if operation.operation.name == "mo.graph":
            yield from _inside(operation.operation)


def _inside(parent: Any) -> Iterator[Any]:
    for region in parent.regions:
        for block in region.blocks:
            for operation in block.operations:
                if operation.operation.name != "mo.chain.create":
                    yield operation.operation
                    yield from _inside(operation.operation)


def _caller(location: str) -> str:
    frames = _FRAME.findall(location.replace("\\22", '"'))
    outside = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    if not outside:
        return ""
    file, line, function = outside[-1]
    return f"{file}:{line} in {function}"
