"""A paged cache for kernel tests, and attention written as loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from max import tree
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from max.nn.kv_cache import MHAKVCacheParams

from maxport.engine.evaluator import Program

CPU = DeviceRef.CPU()
LAYER, LAYERS, PAGE = 1, 2, 128
#: The cache inputs in the order in which MAX flattens them.
NAMES = (
    "kv_blocks",
    "cache_lengths",
    "lookup_table",
    "max_prompt_length",
    "max_cache_length",
    "page_stride",
    "attention_dispatch_metadata",
)


@dataclass
class Cache:
    """Pages of a few sequences, scattered over a pool that starts as noise."""

    kv_heads: int
    head_dim: int
    batch: int
    dtype: torch.dtype = torch.float32
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.params = MHAKVCacheParams(
            dtype=DType.float32 if self.dtype == torch.float32 else DType.bfloat16,
            n_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_layers=LAYERS,
            devices=[CPU],
            page_size=PAGE,
        )
        generator = torch.Generator().manual_seed(3)
        per_sequence = 3
        pages = 1 + self.batch * per_sequence
        self.blocks = torch.randn(
            pages, 2, LAYERS, PAGE, self.kv_heads, self.head_dim, generator=generator
        ).to(self.dtype)
        order = 1 + torch.randperm(pages - 1, generator=generator)
        self.table = order.reshape(self.batch, per_sequence).numpy().astype(np.uint32)
        self.lengths = [0] * self.batch

    def types(self) -> list[Any]:
        return list(tree.leaves(self.params.get_symbolic_inputs()))

    def values(self, new: Sequence[int]) -> list[Any]:
        """The cache inputs of a step that adds `new` tokens per sequence."""
        total = max(old + n for old, n in zip(self.lengths, new, strict=True))
        values: list[Any] = []
        for name, _ in zip(NAMES, self.types(), strict=True):
            values.append(
                {
                    "kv_blocks": self.blocks,
                    "page_stride": np.array([self.blocks[0].numel()], np.int64),
                    "cache_lengths": np.array(self.lengths, np.uint32),
                    "lookup_table": self.table,
                    "max_prompt_length": np.array([max(new)], np.uint32),
                    "max_cache_length": np.array([total], np.uint32),
                    "attention_dispatch_metadata": np.array(
                        [self.batch, max(new), 1, total], np.int64
                    ),
                }[name]
            )
        return values

    def keys(self, sequence: int, which: int = 0) -> torch.Tensor:
        """All cached keys (or values) of a sequence, token by token."""
        rows = []
        for position in range(self.lengths[sequence]):
            page = int(self.table[sequence, position // PAGE])
            rows.append(self.blocks[page, which, LAYER, position % PAGE])
        return torch.stack(rows)


def kernel_graph(cache: Cache, types: Sequence[TensorType], body: Callable[..., Any]) -> Program:
    """A graph of one kernel: inputs, row offsets, cache; `body(values, offsets, kv, layer)`."""
    offsets_type = TensorType(DType.uint32, ["offsets"], CPU)
    with Graph("kernel", input_types=[*types, offsets_type, *cache.types()]) as graph:
        values = [value.tensor for value in graph.inputs[: len(types) + 1]]
        kv = cache.params.unflatten_kv_inputs(iter(graph.inputs[len(types) + 1 :]))[0]
        layer = ops.constant(LAYER, DType.uint32, CPU)
        result = body(values[:-1], values[-1], kv, layer)
        graph.output(*(result if isinstance(result, list | tuple) else [result]))
    return Program(graph)


def offsets_of(counts: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *counts]).astype(np.uint32)


def attention_by_hand(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    start: int,
    visible: Callable[[int, int], bool],
    scale: float,
    *,
    sink: np.ndarray | None = None,
    bias: Callable[[int, int, int], float] | None = None,
) -> np.ndarray:
    """One query, one head, one key at a time, in float64."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = np.zeros((len(q), heads, v.shape[-1]))
    for i in range(len(q)):
        for h in range(heads):
            scores = {}
            for j in range(len(k)):
                if visible(start + i, j):
                    extra = bias(i, h, j) if bias else 0.0
                    scores[j] = float(q[i, h] @ k[j, h // group]) * scale + extra
            logits = [*scores.values(), *([float(sink[h])] if sink is not None else [])]
            top = max(logits)
            total = sum(math.exp(s - top) for s in logits)
            for j, score in scores.items():
                out[i, h] += math.exp(score - top) / total * v[j, h // group]
    return out
