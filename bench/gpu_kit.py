"""Builds the cases of gpu_cases.py: graphs over plain inputs, or over a cache filled by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from max import tree
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.nn.kv_cache import MHAKVCacheParams, MLAKVCacheParams

HOST = DeviceRef.CPU()
BF16, F32 = torch.bfloat16, torch.float32
KINDS = {
    torch.bfloat16: DType.bfloat16,
    torch.float32: DType.float32,
    torch.int32: DType.int32,
    torch.uint32: DType.uint32,
    torch.bool: DType.bool,
}
#: New tokens per sequence: a prefill past 128 keys, then a step through the cache.
COUNTS, NEXT = (12, 150, 7), (1, 2, 1)
#: The long prompt first, then one token per sequence, which MAX's decode kernels take.
DECODE = ((150, 7), (1, 1), (1, 1))
LAYERS, LAYER, PAGE = 2, 1, 128
Body = Callable[..., Any]
Canonical = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass
class Case:
    """One graph and what to run it on.

    Attributes:
        graph: The graph under test.
        steps: Inputs of each step, torch tensors; those at `buffers` are the same objects.
        buffers: Positions of the inputs that are written.
        wrong: A nearby computation, None where there is none.
        canonical: Brings outputs whose order MAX leaves open into one order.
        tf32: float32 matrix products of the kernel round their operands to TF32.
    """

    graph: Graph
    steps: list[list[torch.Tensor]]
    buffers: tuple[int, ...] = ()
    wrong: Graph | None = None
    canonical: Canonical = field(default=lambda outputs: outputs)
    tf32: bool = False


@dataclass
class Kit:
    """Builds cases for one device and dtype."""

    device: DeviceRef
    dtype: torch.dtype = BF16

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)

    def rand(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal values, the same in every process."""
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def type(self, value: torch.Tensor, *, buffer: bool = False, rows: str = "") -> Any:
        """The graph type of `value`; `rows` names its first dim."""
        shape: list[Any] = [rows, *value.shape[1:]] if rows else list(value.shape)
        return (BufferType if buffer else TensorType)(KINDS[value.dtype], shape, self.device)

    def plain(
        self, body: Body, wrong: Body | None, *inputs: torch.Tensor, buffers: Sequence[int] = ()
    ) -> Case:
        """A case of one step with static shapes."""
        types = [self.type(v, buffer=i in buffers) for i, v in enumerate(inputs)]
        return Case(
            graph_of(types, body),
            [list(inputs)],
            tuple(buffers),
            graph_of(types, wrong) if wrong else None,
        )

    def cached(
        self,
        params: Any,
        body: Body,
        wrong: Body | None,
        per_token: Sequence[tuple[int, ...]],
        fixed: Sequence[torch.Tensor],
        steps: Sequence[Sequence[int]] = (COUNTS, NEXT),
    ) -> Case:
        """A case over a paged cache: `body(inputs, offsets, kv, layer)`, run in `steps`.

        Args:
            params: MAX's cache parameters.
            body, wrong: Make outputs of the graph's values.
            per_token: Shapes of the ragged inputs without their first dim.
            fixed: Inputs that are the same in every step.
            steps: New tokens per sequence, step by step.
        """
        leaves = list(tree.leaves(params.get_symbolic_inputs()))
        ragged = [TensorType(KINDS[self.dtype], ["tokens", *s], self.device) for s in per_token]
        offsets = TensorType(DType.uint32, ["offsets"], self.device)
        types = [*ragged, *map(self.type, fixed), offsets, *leaves]

        def wrapped(inner: Body) -> Body:
            def run(*values: Any) -> Any:
                head = len(types) - len(leaves)
                kv = params.unflatten_kv_inputs(iter(values[head:]))[0]
                layer = ops.constant(LAYER, DType.uint32, HOST)
                return inner(values[: head - 1], values[head - 1], kv, layer)

            return run

        pool, lengths = self._pool(params), [0] * len(steps[0])
        runs = []
        for counts in steps:
            tokens = [self.rand(sum(counts), *shape) for shape in per_token]
            new = torch.tensor(np.cumsum([0, *counts]), dtype=torch.uint32)
            runs.append([*tokens, *fixed, new, *_cache(leaves, pool, lengths, counts)])
            lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
        at = len(types) - len(leaves)
        other = graph_of(types, wrapped(wrong)) if wrong else None
        return Case(graph_of(types, wrapped(body)), runs, (at,), other)

    def _pool(self, params: Any) -> torch.Tensor:
        planes = 1 if isinstance(params, MLAKVCacheParams) else 2
        heads = 1 if planes == 1 else params.n_kv_heads
        return self.rand(10, planes, LAYERS, PAGE, heads, params.head_dim)

    def mha(self, kv_heads: int, dim: int) -> MHAKVCacheParams:
        """Parameters of a plain cache."""
        return MHAKVCacheParams(
            dtype=KINDS[self.dtype],
            n_kv_heads=kv_heads,
            head_dim=dim,
            num_layers=LAYERS,
            devices=[self.device],
            page_size=PAGE,
        )


def graph_of(types: Sequence[Any], body: Body) -> Graph:
    """The graph over inputs of `types` whose outputs `body` makes."""
    with Graph("kernel", input_types=list(types)) as graph:
        values = [
            value.buffer if isinstance(kind, BufferType) else value.tensor
            for value, kind in zip(graph.inputs, types, strict=True)
        ]
        result = body(*values)
        graph.output(*(result if isinstance(result, list | tuple) else [result]))
    return graph


def _cache(
    leaves: Sequence[Any], pool: torch.Tensor, lengths: Sequence[int], counts: Sequence[int]
) -> list[torch.Tensor]:
    """Cache inputs in MAX's order: pool, lengths, page table, longest, stride, launch shape."""
    total = max(a + b for a, b in zip(lengths, counts, strict=True))
    table = torch.zeros(len(counts), 24, dtype=torch.int64)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(5)) + 1
    for row in range(len(counts)):
        table[row, :3] = order[3 * row : 3 * row + 3]
    launch = [len(counts), max(counts), 1, total][: int(leaves[6].shape[0])]
    return [
        pool,
        torch.tensor(lengths, dtype=torch.uint32),
        table.to(torch.uint32),
        torch.tensor([max(counts)], dtype=torch.uint32),
        torch.tensor([total], dtype=torch.uint32),
        torch.tensor([pool[0].numel()]),
        torch.tensor(launch),
        *[torch.tensor([1]) for _ in leaves[7:]],
    ]


def frequencies(positions: int, dims: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Cosine and sine alternating, [positions, dims]."""
    angle = torch.outer(torch.arange(positions), 50.0 ** (-torch.arange(0, dims, 2) / dims))
    return torch.stack([angle.cos(), angle.sin()], -1).flatten(1).to(dtype)
