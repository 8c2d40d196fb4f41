"""Rotations as complex numbers, alone and fused with the cache."""

from unittest import mock

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import TensorType
from max.graph import graph as graph_module
from max.nn import kernels
from paged import CPU, Cache, kernel_graph, offsets_of

from maxport.errors import MaxportError

THETA = 100.0


def angles(positions, rotated):
    """[positions, rotated / 2]."""
    return np.outer(positions, THETA ** (-np.arange(0, rotated, 2) / rotated))


def table(length, rotated):
    """Cosine and sine alternating, as MAX lays frequencies out."""
    angle = angles(np.arange(length), rotated)
    return torch.tensor(np.stack([np.cos(angle), np.sin(angle)], -1).reshape(length, -1)).float()


def turn(x, positions, *, interleaved, rotated=None, first=False):
    """x [tokens, heads, dim] turned by complex multiplication."""
    dim = x.shape[-1]
    rotated = rotated or dim
    begin = 0 if first else dim - rotated
    part = x[..., begin : begin + rotated].astype(np.float64)
    if interleaved:
        z = part[..., 0::2] + 1j * part[..., 1::2]
    else:
        z = part[..., : rotated // 2] + 1j * part[..., rotated // 2 :]
    z = z * np.exp(1j * angles(positions, rotated))[:, None]
    out = x.astype(np.float64).copy()
    if interleaved:
        out[..., begin : begin + rotated : 2] = z.real
        out[..., begin + 1 : begin + rotated : 2] = z.imag
    else:
        out[..., begin : begin + rotated // 2] = z.real
        out[..., begin + rotated // 2 : begin + rotated] = z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_split_store(interleaved):
    cache = Cache(kv_heads=2, head_dim=8, batch=2)
    types = [TensorType(DType.float32, ["n", 8 * 8], CPU), TensorType(DType.float32, [32, 8], CPU)]

    def body(values, offsets, kv, layer):
        qkv, freqs = values
        return kernels.rope_split_store_ragged(
            cache.params, qkv, offsets, freqs, kv, layer, 4, interleaved=interleaved
        )

    program = kernel_graph(cache, types, body)
    generator = torch.Generator().manual_seed(1)
    for counts in ([4, 2], [1, 3]):
        qkv = torch.randn(sum(counts), 64, generator=generator)
        offsets = offsets_of(counts)
        old = list(cache.lengths)
        (q,) = program.run([qkv, table(32, 8), offsets, *cache.values(counts)], {})
        cache.lengths = [a + b for a, b in zip(old, counts, strict=True)]
        for sequence, count in enumerate(counts):
            rows = slice(int(offsets[sequence]), int(offsets[sequence + 1]))
            positions = np.arange(old[sequence], old[sequence] + count)
            part = qkv[rows].numpy()
            want_q = turn(part[:, :32].reshape(count, 4, 8), positions, interleaved=interleaved)
            want_k = turn(part[:, 32:48].reshape(count, 2, 8), positions, interleaved=interleaved)
            np.testing.assert_allclose(q[rows].reshape(count, 4, 8), want_q, atol=1e-6)
            np.testing.assert_allclose(cache.keys(sequence)[-count:], want_k, atol=1e-6)
            assert torch.equal(
                cache.keys(sequence, 1)[-count:], qkv[rows][:, 48:].reshape(count, 2, 8)
            )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [4, 6, 16])
def test_rope_split_store_reads_a_table_of_another_width_head_by_head(interleaved, width):
    """The compiled kernel takes `head dim` numbers from position * head dim of the flat table."""
    cache = Cache(kv_heads=1, head_dim=8, batch=1)
    program = fused_rope(cache, width, interleaved=interleaved)
    qkv = torch.randn(3, 24, generator=torch.Generator().manual_seed(2))
    freqs = torch.randn(40, width, generator=torch.Generator().manual_seed(3))
    cache.lengths = [5]
    (q,) = program.run([qkv, freqs, offsets_of([3]), *cache.values([3])], {})
    rows = freqs.reshape(-1)[40:64].reshape(3, 4, 2).double().numpy()
    z = rows[..., 0] + 1j * rows[..., 1]
    part = qkv[:, :8].double().numpy()
    pairs = (part[:, 0::2], part[:, 1::2]) if interleaved else (part[:, :4], part[:, 4:])
    turned = (pairs[0] + 1j * pairs[1]) * z
    want = (
        np.stack([turned.real, turned.imag], -1).reshape(3, 8)
        if interleaved
        else np.concatenate([turned.real, turned.imag], 1)
    )
    np.testing.assert_allclose(q, want, rtol=1e-5, atol=1e-5)


def test_rope_split_store_past_the_end_of_a_narrow_table_is_an_error():
    cache = Cache(kv_heads=1, head_dim=8, batch=1)
    program = fused_rope(cache, 4, interleaved=False)
    qkv = torch.zeros(3, 24)
    cache.lengths = [5]
    with pytest.raises(MaxportError, match="4 wide for heads of 8, past its end"):
        program.run([qkv, torch.zeros(8, 4), offsets_of([3]), *cache.values([3])], {})


def fused_rope(cache, width, *, interleaved):
    """The fused kernel on one head, with a table of `width` columns."""
    types = [TensorType(DType.float32, ["n", 24], CPU)]
    types.append(TensorType(DType.float32, ["positions", width], CPU))

    def body(values, offsets, kv, layer):
        qkv, freqs = values
        return kernels.rope_split_store_ragged(
            cache.params, qkv, offsets, freqs, kv, layer, 1, interleaved=interleaved
        )

    return kernel_graph(cache, types, body)


@pytest.mark.parametrize(
    ("interleaved", "rotated", "first"),
    [(True, 8, False), (False, 8, False), (True, 4, False), (True, 4, True)],
)
def test_rope_ragged(interleaved, rotated, first, run):
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(2))
    offsets = torch.tensor([0, 2, 5], dtype=torch.uint32)
    start = torch.tensor([6, 0], dtype=torch.uint32)
    got = run(
        lambda v, o, s, f: kernels.rope_ragged(
            v, o, s, f, interleaved=interleaved, rope_first=first
        ),
        x,
        offsets,
        start,
        table(16, rotated),
    )
    want = turn(
        x.numpy(),
        np.array([6, 7, 0, 1, 2]),
        interleaved=interleaved,
        rotated=rotated,
        first=first,
    )
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_half_split_rope_over_part_of_a_head_turns_the_ends_of_both_halves(run):
    """As the compiled kernel does: columns 2, 3 pair with 6, 7. Hugging Face pairs others."""
    x = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(4))
    offsets = torch.tensor([0, 2], dtype=torch.uint32)
    start = torch.tensor([3], dtype=torch.uint32)
    got = run(
        lambda x, o, s, f: kernels.rope_ragged(x, o, s, f, interleaved=False),
        x, offsets, start, table(8, 4),
    )  # fmt: skip
    ends = [2, 3, 6, 7]
    want = x.double().numpy().copy()
    want[..., ends] = turn(x[..., ends].numpy(), np.array([3, 4]), interleaved=False)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_fused_qk_rope_turns_what_is_already_cached():
    cache = Cache(kv_heads=1, head_dim=8, batch=1)
    types = [
        TensorType(DType.float32, ["n", 2, 8], CPU),
        TensorType(DType.float32, ["n", 1, 8], CPU),
        TensorType(DType.float32, [16, 8], CPU),
    ]

    def body(values, offsets, kv, layer):
        q, k, freqs = values
        kernels.store_k_cache_ragged(kv, k, offsets, layer)
        return kernels.fused_qk_ragged_rope(
            cache.params, q, offsets, kv, freqs, layer, interleaved=False
        )

    program = kernel_graph(cache, types, body)
    q = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(3))
    k = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(4))
    (got,) = program.run([q, k, table(16, 8), offsets_of([3]), *cache.values([3])], {})
    cache.lengths = [3]
    positions = np.arange(3)
    np.testing.assert_allclose(got, turn(q.numpy(), positions, interleaved=False), atol=1e-6)
    want = turn(k.numpy(), positions, interleaved=False)
    np.testing.assert_allclose(cache.keys(0), want, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_norm_rope_split_store(shared):
    """q and k are normalised by weights and turned; v is normalised bare, from k when shared."""
    cache = Cache(kv_heads=1, head_dim=8, batch=1)
    width = 8 * (2 + (1 if shared else 2))
    types = [
        TensorType(DType.float32, ["n", width], CPU),
        TensorType(DType.float32, [16, 8], CPU),
        *[TensorType(DType.float32, [8], CPU)] * 2,
    ]

    def body(values, offsets, kv, layer):
        qkv, freqs, q_gamma, k_gamma = values
        return kernels.rope_split_store_ragged(
            cache.params,
            qkv,
            offsets,
            freqs,
            kv,
            layer,
            2,
            interleaved=False,
            q_norm_weight=q_gamma,
            k_norm_weight=k_gamma,
            rms_norm_eps=1e-3,
            k_eq_v=shared,
        )

    # The installed kernel library may lack this kernel's signature; the graph is what counts.
    with mock.patch.object(graph_module.KernelLibrary, "verify_custom_op", lambda self, op: None):
        program = kernel_graph(cache, types, body)
    generator = torch.Generator().manual_seed(9)
    qkv = torch.randn(3, width, generator=generator)
    q_gamma, k_gamma = torch.randn(2, 8, generator=generator)
    values = [qkv, table(16, 8), q_gamma, k_gamma, offsets_of([3]), *cache.values([3])]
    (q,) = program.run(values, {})
    cache.lengths = [3]

    def normal(x, gamma):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * gamma

    wide, positions = qkv.double().numpy(), np.arange(3)
    want = turn(
        normal(wide[:, :16].reshape(3, 2, 8), q_gamma.numpy()), positions, interleaved=False
    )
    np.testing.assert_allclose(q.reshape(3, 2, 8), want, rtol=1e-5, atol=1e-5)
    keys = wide[:, 16:24].reshape(3, 1, 8)
    want = turn(normal(keys, k_gamma.numpy()), positions, interleaved=False)
    np.testing.assert_allclose(cache.keys(0), want, rtol=1e-5, atol=1e-5)
    bare = normal(keys if shared else wide[:, 24:].reshape(3, 1, 8), 1.0)
    np.testing.assert_allclose(cache.keys(0, 1), bare, rtol=1e-5, atol=1e-5)
