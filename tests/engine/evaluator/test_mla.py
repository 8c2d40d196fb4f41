"""Multi-head latent attention against plain attention on decompressed keys and values."""

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from max.nn import kernels
from max.nn.attention import MHAMaskVariant
from max.nn.kv_cache import MLAKVCacheParams
from paged import CPU, attention_by_hand, offsets_of
from test_rope import table, turn

from maxport.engine.evaluator import Program

HEADS, NOPE, ROPE, VALUE, LATENT, PAGE = 2, 6, 4, 5, 8, 128


def build():
    params = MLAKVCacheParams(
        dtype=DType.float32,
        head_dim=LATENT + ROPE,
        num_layers=2,
        devices=[CPU],
        page_size=PAGE,
        num_q_heads=HEADS,
    )
    from max import tree

    def f32(*shape):
        return TensorType(DType.float32, list(shape), CPU)

    types = [
        f32("n", HEADS, NOPE + ROPE),
        f32("n", LATENT + ROPE),
        TensorType(DType.uint32, ["offsets"], CPU),
        f32(64, ROPE),
        f32(LATENT),
        f32(HEADS * NOPE, LATENT),
        f32(HEADS, LATENT, NOPE),
        f32(HEADS, VALUE, LATENT),
    ]
    cache = list(tree.leaves(params.get_symbolic_inputs()))
    with Graph("mla", input_types=[*types, *cache]) as graph:
        values = [value.tensor for value in graph.inputs[: len(types)]]
        q, latent, offsets, freqs, gamma, w_k, w_uk, w_uv = values
        kv = params.unflatten_kv_inputs(iter(graph.inputs[len(types) :]))[0]
        layer = ops.constant(1, DType.uint32, CPU)
        starts, cached, lengths = kernels.flare_mla_prefill_plan(params, offsets, kv, layer, 64)
        out = kernels.mla_prefill_decode_graph(
            q, latent, offsets, freqs, gamma, starts, cached, lengths, w_k, w_uk, w_uv,
            params, kv, layer, MHAMaskVariant.CAUSAL_MASK, 0.4, 1e-3, VALUE,
            ops.constant([1, 1, 1], DType.int64, DeviceRef.CPU()),
            ops.constant([1], DType.int64, DeviceRef.CPU()),
        )  # fmt: skip
        graph.output(out)
    return Program(graph)


def cache_values(program, blocks, lengths, pages, new):
    total = max(old + n for old, n in zip(lengths, new, strict=True))
    values = []
    for _, spec in program.inputs[8:]:
        if spec.buffer:
            values.append(blocks)
        elif len(spec.dims) == 2:
            values.append(np.array(pages, np.uint32))
        elif str(spec.dims[0]).endswith("batch_size"):
            values.append(np.array(lengths, np.uint32))
        else:
            size = spec.dims[0] if isinstance(spec.dims[0], int) else 1
            values.append(np.full(size, total, dtype=spec.dtype.to_numpy()))
    return values


def test_prefill_and_decode_equal_plain_attention():
    program = build()
    generator = torch.Generator().manual_seed(1)
    gamma, w_k = torch.randn(LATENT, generator=generator), torch.randn(HEADS * NOPE, LATENT)
    w_uk = w_k.reshape(HEADS, NOPE, LATENT).mT.contiguous()
    w_uv = torch.randn(HEADS, VALUE, LATENT, generator=generator)
    blocks = torch.randn(4, 1, 2, PAGE, 1, LATENT + ROPE, generator=generator)
    pages, lengths = [[3], [1]], [0, 0]
    history = [[], []]
    for counts in ([5, 2], [1, 3]):
        total = sum(counts)
        q = torch.randn(total, HEADS, NOPE + ROPE, generator=generator)
        latent = torch.randn(total, LATENT + ROPE, generator=generator)
        offsets = offsets_of(counts)
        values = cache_values(program, blocks, lengths, pages, counts)
        weights = [table(64, ROPE), gamma, w_k, w_uk, w_uv]
        (out,) = program.run([q, latent, offsets, *weights, *values], {})
        for sequence, count in enumerate(counts):
            rows = slice(int(offsets[sequence]), int(offsets[sequence + 1]))
            start = lengths[sequence]
            positions = np.arange(start, start + count)
            wide = latent[rows].double().numpy()
            normal = wide[:, :LATENT]
            normal = normal / np.sqrt((normal**2).mean(-1, keepdims=True) + 1e-3) * gamma.numpy()
            key = turn(wide[:, None, LATENT:], positions, interleaved=True)[:, 0]
            history[sequence] += list(np.concatenate([normal, key], -1))
            cached = np.array(history[sequence])
            nope = (cached[:, :LATENT] @ w_k.double().numpy().T).reshape(-1, HEADS, NOPE)
            rotated = np.repeat(cached[:, None, LATENT:], HEADS, 1)
            keys = np.concatenate([nope, rotated], -1)
            heads = np.einsum("tl,hvl->thv", cached[:, :LATENT], w_uv.double().numpy())
            queries = turn(q[rows].numpy(), positions, interleaved=True, rotated=ROPE)
            want = attention_by_hand(queries, keys, heads, start, lambda q, k: k <= q, 0.4)
            np.testing.assert_allclose(out[rows], want, rtol=1e-4, atol=1e-5)
            page = blocks[pages[sequence][0], 0, 1, : start + count, 0]
            np.testing.assert_allclose(page, cached, rtol=1e-5, atol=1e-6)
        lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
