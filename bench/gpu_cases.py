"""Graphs of the kernels that MAX 26.7 has on GPUs only, or gets wrong on CPU; see gpu_kernels.py.

A case is one graph and the steps it is run in. Each has, where that makes sense, a `wrong` graph: a
nearby computation that the comparison must be able to tell apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from max import tree
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.nn import kernels, state_space
from max.nn.activation import GatedActivation
from max.nn.attention import MHAMaskVariant as Mask
from max.nn.comm.ep.ep_kernels import fused_silu
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
    """

    graph: Graph
    steps: list[list[torch.Tensor]]
    buffers: tuple[int, ...] = ()
    wrong: Graph | None = None
    canonical: Canonical = field(default=lambda outputs: outputs)


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
            _graph(types, body),
            [list(inputs)],
            tuple(buffers),
            _graph(types, wrong) if wrong else None,
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
        other = _graph(types, wrapped(wrong)) if wrong else None
        return Case(_graph(types, wrapped(body)), runs, (at,), other)

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


def _graph(types: Sequence[Any], body: Body) -> Graph:
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


def attention(
    kit: Kit,
    masks: Sequence[tuple[Mask, int]],
    wrong: Sequence[tuple[Mask, int]],
    *,
    sinks: bool = False,
    relative: int = 0,
    heads: int = 4,
    dim: int = 64,
) -> Case:
    """Keys and values stored by the fused rope kernel, then attention with every mask."""
    params = kit.mha(2, dim)
    extra = [kit.rand(heads)] if sinks else []

    def body(chosen: Sequence[tuple[Mask, int]], options: bool) -> Body:
        def make(values: Any, offsets: Any, kv: Any, layer: Any) -> Any:
            q, qkv, *rest = values
            tail = list(rest)
            table = tail.pop(0) if relative else None
            more: dict[str, Any] = {"rel_logits": table} if relative and options else {}
            if sinks and options:
                more["sink_weights"] = tail[1]
            turned = kernels.rope_split_store_ragged(
                params, qkv, offsets, tail[0], kv, layer, heads, interleaved=False
            )
            attended = [
                kernels.flash_attention_ragged(
                    params, q, offsets, kv, layer, mask, 0.2, local_window_size=window, **more
                )
                for mask, window in chosen
            ]
            return [turned, *attended]

        return make

    shapes = [(heads, dim), ((heads + 4) * dim,)]
    if relative:
        shapes.append((heads, relative))
    # Without sinks or bias the wrong graph differs by their absence, else by its masks.
    other = body(masks, False) if sinks or relative else body(wrong, True) if wrong else None
    return kit.cached(params, body(masks, True), other, shapes, [frequencies(256, dim), *extra])


def rotations(kit: Kit, *, table: int = 64) -> Case:
    """The fused rope kernel in neighbouring pairs, from a table `table` wide for heads of 64."""
    params, heads, dim = kit.mha(2, 64), 4, 64

    def body(values: Any, offsets: Any, kv: Any, layer: Any, *, interleaved: bool = True) -> Any:
        qkv, freqs = values
        return kernels.rope_split_store_ragged(
            params, qkv, offsets, freqs, kv, layer, heads, interleaved=interleaved
        )

    def wrong(*arguments: Any) -> Any:
        return body(*arguments, interleaved=False)

    shapes = [((heads + 4) * dim,)]
    return kit.cached(params, body, wrong, shapes, [frequencies(512, table)])


def latent(kit: Kit, form: str, *, heads: int = 16) -> Case:
    """Multi-head latent attention with DeepSeek's widths, prefill and decode."""
    nope, rope, value, rank = 128, 64, 128, 512
    params = MLAKVCacheParams(
        dtype=KINDS[kit.dtype],
        head_dim=rank + rope,
        num_layers=LAYERS,
        devices=[kit.device],
        page_size=PAGE,
        num_q_heads=heads,
    )
    w_k = kit.rand(heads * nope, rank) * rank**-0.5
    w_uk = w_k.reshape(heads, nope, rank).mT.contiguous()
    w_uv = kit.rand(heads, value, rank) * rank**-0.5

    def body(values: Any, offsets: Any, kv: Any, layer: Any, *, scale: float = 0.07) -> Any:
        q, row, freqs, gamma, by_key, by_latent, up = values
        plan = kernels.flare_mla_prefill_plan(params, offsets, kv, layer, 512, max_chunks=1)
        starts, cached, lengths = plan
        lengths = lengths.to(HOST)
        shared = (params, kv, layer, Mask.CAUSAL_MASK, scale, 1e-3, value)
        metadata = (kv.attention_dispatch_metadata, kv.mla_num_partitions)
        if form == "prefill":
            return kernels.mla_prefill_graph(
                q, row, offsets, freqs, gamma, starts, cached, lengths, by_key, up, *shared
            )
        if form == "decode":
            return kernels.mla_decode_graph(
                q, row, offsets, freqs, gamma, by_latent, up, *shared, *metadata
            )
        return kernels.mla_prefill_decode_graph(
            q, row, offsets, freqs, gamma, starts, cached, lengths, by_key, by_latent, up, *shared,
            *metadata,
        )  # fmt: skip

    def wrong(*arguments: Any) -> Any:
        return body(*arguments, scale=0.08)

    fixed = [frequencies(256, rope, kit.dtype), kit.rand(rank), w_k, w_uk, w_uv]
    steps = {
        "prefill": (COUNTS, (3, 20, 5)),
        "decode": ((1, 1, 1),) * 3,
        "both": (COUNTS, (1, 1, 1)),
    }[form]
    return kit.cached(params, body, wrong, [(heads, nope + rope), (rank + rope,)], fixed, steps)


def experts(kit: Kit, *, hidden: int, inner: int, count: int, k: int, tokens: int) -> Case:
    """Sort by expert, both grouped products around the gated activation, unsort, weighted sum."""
    x = kit.rand(tokens, hidden)
    up = kit.rand(count, 2 * inner, hidden) * hidden**-0.5
    down = kit.rand(count, hidden, inner) * inner**-0.5
    scores = torch.rand(tokens, count, generator=kit.generator)
    chosen = scores.topk(k, -1).indices.to(torch.int32)
    share = torch.softmax(kit.rand(tokens, k, dtype=F32), -1)

    def body(x: Any, up: Any, down: Any, chosen: Any, share: Any, *, swapped: bool = False) -> Any:
        flat = ops.reshape(chosen, [-1])
        order, starts, restore, ids, stats = kernels.moe_create_indices(flat, count)
        rows = ops.gather(x, ops.cast(order, DType.int32) // k, axis=0)
        wide = kernels.grouped_matmul_ragged(rows, up, starts, ids, stats)
        # Rows within an expert's group come in any order; `restore` puts them back.
        in_order = ops.gather(wide, ops.cast(restore, DType.int32), axis=0)
        if swapped:
            wide = ops.concat([wide[:, inner:], wide[:, :inner]], axis=1)
        y = kernels.grouped_matmul_ragged(fused_silu(wide, starts), down, starts, ids, stats)
        return [in_order, kernels.moe_finalize(y, restore, share, DType.float32)]

    def wrong(*values: Any) -> Any:
        return body(*values, swapped=True)

    return kit.plain(body, wrong, x, up, down, chosen, share)


def indices(kit: Kit) -> Case:
    """Sorting token slots by expert, many slots and empty experts."""
    ids = torch.randint(0, 40, (700,), generator=kit.generator).to(torch.int32)
    ids[ids == 7] = 8

    def canonical(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        order, starts, restore, groups, stats = [value.long() for value in outputs]
        grouped = torch.cat([order[a:b].sort().values for a, b in itertools.pairwise(starts)])
        return [grouped, starts, order[restore], groups, stats]

    case = kit.plain(lambda v: kernels.moe_create_indices(v, 40), None, ids)
    case.canonical = canonical
    return case


def by_expert(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Chosen experts in rising order with their weights; MAX leaves the slots' order open."""
    order = outputs[0].long().argsort(-1)
    return [value.gather(1, order) if i < 2 else value for i, value in enumerate(outputs)]


def router(kit: Kit, form: str) -> Case:
    """One of MAX's routers, with sizes of models that use it."""
    tokens, count = 33, 64
    scores, bias = torch.sigmoid(kit.rand(tokens, count, dtype=F32)), kit.rand(count, dtype=F32)
    bias = bias * 0.2

    def grouped(groups: int, kept: int, scale: float) -> Body:
        return lambda s, b: kernels.moe_router_group_limited(
            s, b, count, 8, groups, kept, True, scale
        )

    if form == "group limited":
        case = kit.plain(grouped(8, 4, 2.5), grouped(8, 3, 2.5), scores, bias)
    elif form == "single group":
        case = kit.plain(grouped(1, 1, 2.5), grouped(1, 1, 2.0), scores, bias)
    elif form == "sigmoid gemv":
        x, gate = kit.rand(tokens, 256), kit.rand(count, 256, dtype=F32) / 16

        def gemv(scale: float) -> Body:
            return lambda x, g, b: kernels._moe_sigmoid_gemv_router(x, g, b, 4, True, scale)

        case = kit.plain(gemv(1.5), gemv(1.0), x, gate, bias)
    else:
        logits = kit.rand(tokens, count + 2, dtype=F32)

        def sink(scale: float) -> Body:
            return lambda x, b, g: kernels.moe_sink_gate_router(x, b, g, count, 6, 2, scale)

        case = kit.plain(sink(3.0), sink(2.0), logits, bias, torch.tensor([0.7]))
    case.canonical = by_expert
    return case


def gate(kit: Kit) -> Case:
    """bfloat16 states times a float32 gate."""
    x, weight = kit.rand(33, 256), kit.rand(64, 256, dtype=F32) / 16
    return kit.plain(
        kernels._router_gate_mixed_gemv,
        lambda x, w: kernels._router_gate_mixed_gemv(x, w * 1.02),
        x,
        weight,
    )


def gated_activations(kit: Kit) -> Case:
    """Every activation that the fused kernel has, halves and interleaved pairs."""
    x, offsets = kit.rand(40, 256) * 3, torch.tensor([0, 12, 40], dtype=torch.uint32)
    kinds = [
        GatedActivation(),
        GatedActivation(limit=0.5),
        GatedActivation("swigluoai", alpha=1.702, limit=7.0),
        GatedActivation("gelu_tanh"),
    ]

    def body(x: Any, offsets: Any) -> Any:
        return [
            fused_silu(x, offsets, activation=kind, interleaved=pairs)
            for kind in kinds
            for pairs in (False, True)
        ]

    def wrong(x: Any, offsets: Any) -> Any:
        return [
            fused_silu(x, offsets, activation=kind, interleaved=not pairs)
            for kind in kinds
            for pairs in (False, True)
        ]

    return kit.plain(body, wrong, x, offsets)


def delta_rule(kit: Kit) -> Case:
    """Gated delta rule as in Qwen 3.5: convolution, then the recurrence, states in pools."""
    key_heads, heads, dim, tokens = 2, 4, 128, 40
    width = 2 * key_heads * dim + heads * dim
    x, weight = kit.rand(tokens, width, dtype=F32), kit.rand(width, 4, dtype=F32) / 2
    decay = torch.sigmoid(kit.rand(tokens, heads, dtype=F32) + 2)
    beta = torch.sigmoid(kit.rand(tokens, heads, dtype=F32))
    windows = kit.rand(3, width, 3, dtype=F32)
    states = kit.rand(3, heads, dim, dim, dtype=F32) / 10
    slots = torch.tensor([2, 0], dtype=torch.uint32)
    offsets = torch.tensor([0, 17, 40], dtype=torch.uint32)

    def body(
        x: Any,
        weight: Any,
        decay: Any,
        beta: Any,
        slots: Any,
        offsets: Any,
        windows: Any,
        states: Any,
    ) -> Any:
        mixed = state_space.gated_delta_conv1d_fwd(x, weight, windows, slots, offsets)
        return [
            mixed,
            state_space.gated_delta_recurrence_fwd(mixed, decay, beta, states, slots, offsets),
        ]

    def wrong(x: Any, weight: Any, decay: Any, beta: Any, *rest: Any) -> Any:
        return body(x, weight, decay * 0.99, beta, *rest)

    values = (x, weight, decay, beta, slots, offsets, windows, states)
    return kit.plain(body, wrong, *values, buffers=(6, 7))


def mamba(kit: Kit) -> Case:
    """Mamba-2 as in Nemotron-H: convolution with SiLU, scan, gated group norm."""
    heads, dim, groups, size, tokens = 8, 64, 2, 128, 40
    flags = torch.tensor([True, False])
    slots = torch.tensor([2, 0], dtype=torch.uint32)
    starts = torch.tensor([0, 17, 40], dtype=torch.int32)
    x, dt = kit.rand(tokens, heads, dim), kit.rand(tokens, heads)
    a, d, dt_bias = -kit.rand(heads, dtype=F32).abs(), kit.rand(heads, dtype=F32), kit.rand(heads)
    b, c = kit.rand(tokens, groups, size) / 8, kit.rand(tokens, groups, size) / 8
    pool = kit.rand(3, heads, dim, size, dtype=F32)
    conv_x, weight, bias = kit.rand(tokens, 96), kit.rand(96, 4), kit.rand(96)
    window = kit.rand(3, 96, 3)
    y, z, gamma = kit.rand(tokens, 128), kit.rand(tokens, 128), kit.rand(128)
    values = [x, dt, a, b, c, d, dt_bias.float(), flags, slots, starts]
    values += [conv_x, weight, bias, y, z, gamma, pool, window]

    def body(*v: Any, epsilon: float = 1e-5) -> Any:
        scanned = state_space.mamba2_ssd_chunk_scan_varlen_fwd_inplace(
            *v[:7], v[16], v[9], v[7], v[8]
        )
        mixed = state_space.causal_conv1d_varlen_fwd(
            v[10], v[11], v[12], v[17], v[9], v[8], v[7], channels_last=True
        )
        normal = state_space.gated_group_rmsnorm(v[13], v[14], v[15], epsilon, 32)
        return [scanned, mixed, normal]

    def wrong(*v: Any) -> Any:
        return body(v[0], v[1] * 1.05, *v[2:], epsilon=0.1)

    return kit.plain(body, wrong, *values, buffers=(16, 17))


def sum_of_broadcast(kit: Kit) -> Case:
    """A sum over an axis that broadcast_to made: wrong on CPU (bench/upstream)."""

    def body(mask: Any, *, axis: int = -1) -> Any:
        wide = ops.broadcast_to(ops.unsqueeze(mask, 1), (2, 8, 5))
        return ops.sum(wide, axis=axis)

    return kit.plain(body, lambda mask: body(mask) * 0.2, kit.rand(2, 5))


C, S, K, N = (
    Mask.CAUSAL_MASK,
    Mask.SLIDING_WINDOW_CAUSAL_MASK,
    Mask.CHUNKED_CAUSAL_MASK,
    Mask.NULL_MASK,
)
CASES: dict[str, tuple[torch.dtype, Callable[[Kit], Case]]] = {
    "attention: causal, all, window 128, chunk 128": (
        BF16,
        lambda k: attention(
            k, [(C, -1), (N, -1), (S, 128), (K, 128)], [(N, -1), (C, -1), (S, 100), (K, 64)]
        ),
    ),
    "attention: the same in float32": (
        F32,
        lambda k: attention(
            k, [(C, -1), (N, -1), (S, 128), (K, 128)], [(N, -1), (C, -1), (S, 100), (K, 64)]
        ),
    ),
    "attention: windows 8, 16, 100": (
        BF16,
        lambda k: attention(k, [(S, 8), (S, 16), (S, 100)], [(S, 9), (S, 17), (S, 101)]),
    ),
    "attention: window 8, head dim 128": (
        BF16,
        lambda k: attention(k, [(S, 8)], [(S, 9)], dim=128),
    ),
    "attention: chunks of 16": (BF16, lambda k: attention(k, [(K, 16)], [(K, 17)])),
    "attention: sinks past 128, causal and windows": (
        BF16,
        lambda k: attention(k, [(C, -1), (S, 128), (S, 16)], [], sinks=True, heads=8),
    ),
    "attention: relative logits": (
        BF16,
        lambda k: attention(k, [(C, -1), (S, 128)], [], relative=64),
    ),
    "rope in pairs": (BF16, rotations),
    "rope, table half as wide as a head": (BF16, lambda k: rotations(k, table=32)),
    "MLA prefill and decode": (BF16, lambda k: latent(k, "both")),
    "MLA prefill": (BF16, lambda k: latent(k, "prefill")),
    "MLA decode": (BF16, lambda k: latent(k, "decode")),
    "MoE indices": (BF16, indices),
    "MoE layer, 8 experts of 256": (
        BF16,
        lambda k: experts(k, hidden=256, inner=256, count=8, k=2, tokens=40),
    ),
    "MoE layer, 64 experts of 512": (
        BF16,
        lambda k: experts(k, hidden=1024, inner=512, count=64, k=6, tokens=130),
    ),
    "MoE router, group limited": (F32, lambda k: router(k, "group limited")),
    "MoE router, single group": (F32, lambda k: router(k, "single group")),
    "MoE router, sigmoid gemv": (BF16, lambda k: router(k, "sigmoid gemv")),
    "MoE router, sink gate": (F32, lambda k: router(k, "sink gate")),
    "MoE gate, bfloat16 by float32": (BF16, gate),
    "gated activations": (BF16, gated_activations),
    "gated delta rule": (F32, delta_rule),
    "sum of a broadcast": (F32, sum_of_broadcast),
    "Mamba-2 scan, convolution, norm": (BF16, mamba),
}
