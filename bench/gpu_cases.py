"""Graphs of the kernels that MAX 26.7 has on GPUs only, or gets wrong on CPU; see gpu_kernels.py.

A case is one graph and the steps it is run in. Each has, where that makes sense, a `wrong` graph: a
nearby computation that the comparison must be able to tell apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_kit import (
    BF16,
    COUNTS,
    DECODE,
    F32,
    HOST,
    KINDS,
    LAYERS,
    NEXT,
    PAGE,
    Body,
    Case,
    Kit,
    frequencies,
    graph_of,
)
from max.dtype import DType
from max.graph import Graph, TensorType, ops
from max.nn import kernels, state_space
from max.nn.activation import GatedActivation
from max.nn.attention import MHAMaskVariant as Mask
from max.nn.comm.ep.ep_kernels import fused_silu
from max.nn.kv_cache import MLAKVCacheParams


def attention(
    kit: Kit,
    masks: Sequence[tuple[Mask, int]],
    wrong: Sequence[tuple[Mask, int]],
    *,
    sinks: bool = False,
    relative: int = 0,
    heads: int = 4,
    dim: int = 64,
    steps: Sequence[Sequence[int]] = (COUNTS, NEXT),
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
    fixed = [frequencies(256, dim), *extra]
    case = kit.cached(params, body(masks, True), other, shapes, fixed, steps)
    case.tf32 = kit.dtype == F32
    return case


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


FLAGS = torch.tensor([True, False])
SLOTS = torch.tensor([2, 0], dtype=torch.uint32)
STARTS = torch.tensor([0, 17, 40], dtype=torch.int32)


def mamba_scan(kit: Kit) -> Case:
    """Mamba-2 as in Nemotron-H, a sequence that continues and one that begins."""
    heads, dim, groups, size, tokens = 8, 64, 2, 128, 40
    a, d, dt_bias = -kit.rand(heads).abs(), kit.rand(heads), kit.rand(heads)
    b, c = kit.rand(tokens, groups, size) / 8, kit.rand(tokens, groups, size) / 8
    values = [kit.rand(tokens, heads, dim), kit.rand(tokens, heads), a, b, c, d, dt_bias]
    pool = kit.rand(3, heads, dim, size, dtype=F32)

    def body(*v: Any) -> Any:
        return state_space.mamba2_ssd_chunk_scan_varlen_fwd_inplace(*v[:7], v[10], v[9], v[7], v[8])

    def wrong(x: Any, dt: Any, *rest: Any) -> Any:
        return body(x, dt * 1.05, *rest)

    return kit.plain(body, wrong, *values, FLAGS, SLOTS, STARTS, pool, buffers=(10,))


def convolution(kit: Kit) -> Case:
    """Ragged causal convolution with SiLU and a cached window."""
    values = [kit.rand(40, 96), kit.rand(96, 4), kit.rand(96)]
    window = kit.rand(3, 96, 3)

    def body(x: Any, weight: Any, bias: Any, flags: Any, slots: Any, starts: Any, pool: Any) -> Any:
        return state_space.causal_conv1d_varlen_fwd(
            x, weight, bias, pool, starts, slots, flags, channels_last=True
        )

    def wrong(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        return body(x, weight, bias * 0, *rest)

    return kit.plain(body, wrong, *values, FLAGS, SLOTS, STARTS, window, buffers=(6,))


def gated_norm(kit: Kit) -> Case:
    """RMSNorm in groups of the gated scan output."""

    def norm(group: int) -> Body:
        return lambda y, z, w: state_space.gated_group_rmsnorm(y, z, w, 1e-5, group)

    return kit.plain(norm(32), norm(64), kit.rand(40, 128), kit.rand(40, 128), kit.rand(128))


def sum_of_broadcast(kit: Kit) -> Case:
    """A sum over an axis that broadcast_to made: wrong on CPU (bench/upstream)."""
    kind = TensorType(DType.float32, ["batch", "length"], kit.device)

    def summed(factor: float) -> Graph:
        def body(mask: Any) -> Any:
            wide = ops.broadcast_to(ops.unsqueeze(mask, 1), ("batch", 8, "length"))
            return ops.sum(wide, axis=-1) * factor

        return graph_of([kind], body)

    return Case(summed(1.0), [[torch.ones(2, 5)]], wrong=summed(0.2))


def products(kit: Kit, rows: Sequence[int]) -> Case:
    """Matrix products of a small Llama for batches of so many rows."""
    shapes = ((512, 256), (256, 256), (1024, 256), (256, 512))
    weights = [kit.rand(*shape) * shape[1] ** -0.5 for shape in shapes]
    types = [TensorType(KINDS[kit.dtype], ["rows", width], kit.device) for width in (256, 512)]
    types += map(kit.type, weights)

    def body(factor: float) -> Body:
        def make(x: Any, y: Any, *weights: Any) -> Any:
            inputs = [x if shape[1] == 256 else y for shape in shapes]
            pairs = zip(inputs, weights, strict=True)
            return [a @ ops.transpose(w, 0, 1) * factor for a, w in pairs]

        return make

    steps = [[kit.rand(n, 256), kit.rand(n, 512), *weights] for n in rows]
    return Case(graph_of(types, body(1.0)), steps, wrong=graph_of(types, body(1.03)))


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
    "attention: decode, causal, window 16": (
        BF16,
        lambda k: attention(k, [(C, -1), (S, 16)], [(N, -1), (S, 17)], steps=DECODE),
    ),
    "attention: decode, sinks, causal and window 16": (
        BF16,
        lambda k: attention(k, [(C, -1), (S, 16)], [], sinks=True, heads=8, steps=DECODE),
    ),
    "attention: decode in float32": (
        F32,
        lambda k: attention(k, [(C, -1), (S, 16)], [(N, -1), (S, 17)], steps=DECODE),
    ),
    "attention: decode, sinks, in float32": (
        F32,
        lambda k: attention(k, [(C, -1), (S, 16)], [], sinks=True, heads=8, steps=DECODE),
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
    "MoE layer, widths of gpt-oss": (
        BF16,
        lambda k: experts(k, hidden=2880, inner=2880, count=8, k=4, tokens=40),
    ),
    "MoE layer, widths of Qwen3-30B": (
        BF16,
        lambda k: experts(k, hidden=2048, inner=768, count=16, k=8, tokens=130),
    ),
    "MoE layer, odd widths": (
        BF16,
        lambda k: experts(k, hidden=200, inner=72, count=16, k=4, tokens=40),
    ),
    "MoE layer in float32": (
        F32,
        lambda k: experts(k, hidden=256, inner=128, count=16, k=4, tokens=40),
    ),
    "MoE router, group limited": (F32, lambda k: router(k, "group limited")),
    "MoE router, single group": (F32, lambda k: router(k, "single group")),
    "MoE router, sigmoid gemv": (BF16, lambda k: router(k, "sigmoid gemv")),
    "MoE router, sink gate": (F32, lambda k: router(k, "sink gate")),
    "MoE gate, bfloat16 by float32": (BF16, gate),
    "gated activations": (BF16, gated_activations),
    "gated delta rule": (F32, delta_rule),
    "matrix products, 1 to 157 rows": (
        BF16,
        lambda k: products(k, (1, 2, 7, 9, 16, 30, 32, 37, 64, 100, 128, 129, 150, 157)),
    ),
    "matrix products, 1, 64, 128, 256 and 512 rows": (
        BF16,
        lambda k: products(k, (1, 64, 128, 256, 512)),
    ),
    "matrix products, 192 and 320 rows": (BF16, lambda k: products(k, (192, 320))),
    "sum of a broadcast": (F32, sum_of_broadcast),
    "Mamba-2 scan": (BF16, mamba_scan),
    "Mamba-2 scan in float32": (F32, mamba_scan),
    "gated group norm in float32": (F32, gated_norm),
    "causal convolution": (BF16, convolution),
    "gated group norm": (BF16, gated_norm),
}
