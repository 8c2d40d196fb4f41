"""Paged attention against loops over single tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from max.dtype import DType
from max.graph import TensorType
from max.nn import kernels
from max.nn.attention import MHAMaskVariant as Mask
from paged import CPU, Cache, attention_by_hand, kernel_graph, offsets_of

MASKS = {
    "causal": (Mask.CAUSAL_MASK, -1, lambda q, k: k <= q),
    "null": (Mask.NULL_MASK, -1, lambda q, k: True),
    "window 5": (Mask.SLIDING_WINDOW_CAUSAL_MASK, 5, lambda q, k: k <= q and q - k < 5),
    "window 1": (Mask.SLIDING_WINDOW_CAUSAL_MASK, 1, lambda q, k: k == q),
    "window 5 both ways": (Mask.SLIDING_WINDOW_NONCAUSAL_MASK, 5, lambda q, k: q - k < 5),
    "chunk 4": (Mask.CHUNKED_CAUSAL_MASK, 4, lambda q, k: k <= q and q // 4 == k // 4),
}


def heads(count, dim, dtype=DType.float32):
    return TensorType(dtype, ["tokens", count, dim], CPU)


def graph_of(cache, n_heads, mask, window, *, extra=(), **options):
    """Store keys and values, then attend."""
    types = [heads(n_heads, cache.head_dim), *[heads(cache.kv_heads, cache.head_dim)] * 2, *extra]

    def body(values, offsets, kv, layer):
        q, k, v, *more = values
        kernels.store_k_cache_ragged(kv, k, offsets, layer)
        kernels.store_v_cache_ragged(kv, v, offsets, layer)
        named = {name: more[i] for i, name in enumerate(options.get("named", ()))}
        return kernels.flash_attention_ragged(
            cache.params, q, offsets, kv, layer, mask, 0.3, local_window_size=window, **named
        )

    return kernel_graph(cache, types, body)


def step(program, cache, counts, n_heads, generator, extra=()):
    """Run one step on random tokens; return q and output per sequence, and advance the cache."""
    total = sum(counts)
    q = torch.randn(total, n_heads, cache.head_dim, generator=generator)
    k, v = torch.randn(2, total, cache.kv_heads, cache.head_dim, generator=generator)
    offsets = offsets_of(counts)
    inputs = [q, k, v, *extra, offsets, *cache.values(counts)]
    (out,) = program.run(inputs, {})
    cache.lengths = [old + n for old, n in zip(cache.lengths, counts, strict=True)]
    for sequence in range(cache.batch):
        first, last = int(offsets[sequence]), int(offsets[sequence + 1])
        if last > first:
            assert torch.equal(cache.keys(sequence)[-(last - first) :], k[first:last])
    return q, out, offsets


def expected(cache, sequence, q, counts, visible, **options):
    start = cache.lengths[sequence] - counts[sequence]
    keys, values = cache.keys(sequence).numpy(), cache.keys(sequence, 1).numpy()
    return attention_by_hand(q.numpy(), keys, values, start, visible, 0.3, **options)


@pytest.mark.parametrize("name", MASKS)
def test_masks_over_prefill_chunk_and_decode(name):
    mask, window, visible = MASKS[name]
    cache = Cache(kv_heads=2, head_dim=8, batch=2)
    program = graph_of(cache, 4, mask, window)
    generator = torch.Generator().manual_seed(1)
    for counts in ([9, 3], [1, 1], [4, 2]):
        q, out, offsets = step(program, cache, counts, 4, generator)
        for sequence in range(2):
            rows = slice(int(offsets[sequence]), int(offsets[sequence + 1]))
            want = expected(cache, sequence, q[rows], counts, visible)
            np.testing.assert_allclose(out[rows], want, rtol=1e-5, atol=1e-6)


def test_a_sequence_over_two_pages():
    cache = Cache(kv_heads=1, head_dim=4, batch=1)
    program = graph_of(cache, 2, Mask.CAUSAL_MASK, -1)
    generator = torch.Generator().manual_seed(2)
    step(program, cache, [126], 2, generator)
    q, out, _ = step(program, cache, [5], 2, generator)
    want = expected(cache, 0, q, [5], lambda q, k: k <= q)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@settings(max_examples=8, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(any),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([2, 5, 16]),
)
def test_any_ragged_batch(counts, group, kv_heads, dim):
    cache = Cache(kv_heads=kv_heads, head_dim=dim, batch=len(counts))
    program = graph_of(cache, group * kv_heads, Mask.CAUSAL_MASK, -1)
    generator = torch.Generator().manual_seed(len(counts))
    q, out, offsets = step(program, cache, counts, group * kv_heads, generator)
    for sequence, count in enumerate(counts):
        rows = slice(int(offsets[sequence]), int(offsets[sequence + 1]))
        if count:
            want = expected(cache, sequence, q[rows], counts, lambda q, k: k <= q)
            np.testing.assert_allclose(out[rows], want, rtol=1e-5, atol=1e-6)


def test_sinks_take_part_in_the_softmax_only():
    cache = Cache(kv_heads=2, head_dim=8, batch=1)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    extra = [TensorType(DType.float32, [4], CPU)]
    program = graph_of(cache, 4, Mask.CAUSAL_MASK, -1, extra=extra, named=["sink_weights"])
    generator = torch.Generator().manual_seed(4)
    for counts in ([6], [1]):
        q, out, _ = step(program, cache, counts, 4, generator, [sinks])
        want = expected(cache, 0, q, counts, lambda q, k: k <= q, sink=sinks.numpy())
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [-1, 4])
def test_relative_logits_are_looked_up_by_distance(window):
    cache = Cache(kv_heads=2, head_dim=8, batch=1)
    mask = Mask.CAUSAL_MASK if window < 0 else Mask.SLIDING_WINDOW_CAUSAL_MASK
    extra = [TensorType(DType.float32, ["tokens", 4, 5], CPU)]
    program = graph_of(cache, 4, mask, window, extra=extra, named=["rel_logits"])
    generator = torch.Generator().manual_seed(5)
    for counts in ([7], [2]):
        table = torch.randn(counts[0], 4, 5, generator=generator)
        q, out, _ = step(program, cache, counts, 4, generator, [table])
        start = cache.lengths[0] - counts[0]

        def bias(i, h, j, table=table, start=start):
            distance = start + i - j
            return float(table[i, h, distance]) if 0 <= distance < 5 else 0.0

        def visible(q, k):
            return k <= q and (window < 0 or q - k < window)

        want = expected(cache, 0, q, counts, visible, bias=bias)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_other_layers_pages_and_slots_are_left_alone():
    cache = Cache(kv_heads=1, head_dim=4, batch=2)
    before = cache.blocks.clone()
    program = graph_of(cache, 1, Mask.CAUSAL_MASK, -1)
    step(program, cache, [3, 2], 1, torch.Generator().manual_seed(6))
    changed = (cache.blocks != before).flatten(4).any(-1).nonzero().tolist()
    want = [
        [int(cache.table[sequence, 0]), which, 1, slot]
        for sequence, count in enumerate([3, 2])
        for which in (0, 1)
        for slot in range(count)
    ]
    assert sorted(changed) == sorted(want)


@pytest.mark.parametrize("name", ["causal", "null", "window 5"])
def test_attention_without_a_cache(name, run, rand):
    mask, window, visible = MASKS[name]
    q, k, v = rand(2, 6, 4, 8), rand(2, 6, 2, 8), rand(2, 6, 2, 8)
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    valid = torch.tensor([6, 4], dtype=torch.uint32)
    options = {"mask_variant": mask, "scale": 0.3, "local_window_size": window}
    full = run(lambda q, k, v: kernels.flash_attention_gpu(q, k, v, **options), q, k, v)
    part = run(
        lambda q, k, v, n: kernels.flash_attention_gpu(q, k, v, valid_length=n, **options),
        q,
        k,
        v,
        valid,
    )
    for row, length in ((0, 6), (1, 4)):
        arrays = [x[row].numpy() for x in (q, k, v)]
        want = attention_by_hand(*arrays, 0, visible, 0.3)
        np.testing.assert_allclose(full[row], want, rtol=1e-5, atol=1e-6)
        cut = [x[:length] for x in arrays]
        want = attention_by_hand(*cut, 0, visible, 0.3)
        np.testing.assert_allclose(part[row, :length], want, rtol=1e-5, atol=1e-6)


def test_ragged_attention_without_a_cache(run, rand):
    q, k, v = rand(7, 2, 8), rand(7, 2, 8), rand(7, 2, 8)
    offsets = torch.tensor([0, 3, 7], dtype=torch.uint32)
    longest = torch.tensor([4], dtype=torch.uint32)
    got = run(
        lambda q, k, v, o, n: kernels.flash_attention_ragged_gpu(
            q, k, v, o, n, mask_variant=Mask.NULL_MASK, scale=0.3
        ),
        q,
        k,
        v,
        offsets,
        longest,
    )
    for first, last in ((0, 3), (3, 7)):
        arrays = [x[first:last].numpy() for x in (q, k, v)]
        want = attention_by_hand(*arrays, 0, lambda q, k: True, 0.3)
        np.testing.assert_allclose(got[first:last], want, rtol=1e-5, atol=1e-6)


def test_attention_with_an_additive_mask(run, rand):
    q, k, v, mask = rand(1, 3, 2, 8), rand(1, 5, 2, 8), rand(1, 5, 2, 8), rand(1, 3, 5)
    got = run(lambda q, k, v, m: kernels.masked_flash_attention_gpu(q, k, v, m, 0.3), q, k, v, mask)
    arrays = [x[0].numpy() for x in (q, k, v)]
    want = attention_by_hand(
        *arrays, 0, lambda q, k: True, 0.3, bias=lambda i, h, j: float(mask[0, i, j])
    )
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6)
