"""Norms of queries and cached keys."""

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import TensorType
from max.nn import kernels
from paged import CPU, Cache, kernel_graph, offsets_of


def normal(x, gamma, offset=0.0, epsilon=1e-3):
    wide = x.double().numpy()
    factor = np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon)
    return wide / factor * (gamma.double().numpy() + offset)


@pytest.mark.parametrize("per_head", [True, False])
def test_key_cache_norm(per_head, rand):
    cache = Cache(kv_heads=2, head_dim=8, batch=2)
    columns = 8 if per_head else 16
    types = [
        TensorType(DType.float32, ["n", 2, 8], CPU),
        TensorType(DType.float32, [columns], CPU),
    ]

    def body(values, offsets, kv, layer):
        k, gamma = values
        kernels.store_k_cache_ragged(kv, k, offsets, layer)
        kernels.rms_norm_key_cache(
            cache.params, kv, gamma, 1e-3, layer, k.shape[0], offsets, 1.0, per_head_norm=per_head
        )
        return k

    program = kernel_graph(cache, types, body)
    k, gamma = rand(5, 2, 8), rand(columns)
    program.run([k, gamma, offsets_of([2, 3]), *cache.values([2, 3])], {})
    cache.lengths = [2, 3]
    want = normal(k if per_head else k.flatten(1), gamma, 1.0).reshape(5, 2, 8)
    got = torch.cat([cache.keys(0), cache.keys(1)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_fused_query_and_key_norm(rand):
    cache = Cache(kv_heads=1, head_dim=8, batch=1)
    types = [
        TensorType(DType.float32, ["n", 3, 8], CPU),
        TensorType(DType.float32, ["n", 1, 8], CPU),
        *[TensorType(DType.float32, [8], CPU)] * 2,
    ]

    def body(values, offsets, kv, layer):
        q, k, q_gamma, k_gamma = values
        kernels.store_k_cache_ragged(kv, k, offsets, layer)
        return kernels.fused_qk_ragged_rms_norm(
            cache.params, q, offsets, kv, q_gamma, k_gamma, 1e-3, layer, 0.5
        )

    program = kernel_graph(cache, types, body)
    q, k, q_gamma, k_gamma = rand(4, 3, 8), rand(4, 1, 8), rand(8), rand(8)
    values = [q, k, q_gamma, k_gamma, offsets_of([4]), *cache.values([4])]
    (got,) = program.run(values, {})
    cache.lengths = [4]
    np.testing.assert_allclose(got, normal(q, q_gamma, 0.5), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cache.keys(0), normal(k, k_gamma, 0.5), rtol=1e-5, atol=1e-6)


def test_norm_from_given_statistics(run, rand):
    q, k = rand(3, 8), rand(3, 4)
    q_gamma, k_gamma = rand(8), rand(4)

    def body(q, k, q_gamma, k_gamma):
        variance = kernels.row_mean_of_squares_qk(q, k)
        return kernels.apply_qk_rms_norm(q, k, variance, q_gamma, k_gamma, 1e-3)

    got_q, got_k = run(body, q, k, q_gamma, k_gamma)
    np.testing.assert_allclose(got_q, normal(q, q_gamma), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_k, normal(k, k_gamma), rtol=1e-5, atol=1e-6)


def test_fused_qkv_projection_stores_keys_and_values(rand):
    cache = Cache(kv_heads=2, head_dim=4, batch=1)
    types = [
        TensorType(DType.float32, ["n", 6], CPU),
        TensorType(DType.float32, [4 * 4 + 16, 6], CPU),
        TensorType(DType.float32, [32], CPU),
    ]

    def body(values, offsets, kv, layer):
        x, weight, bias = values
        return kernels.fused_qkv_ragged_matmul(
            cache.params, x, offsets, weight, kv, layer, 4, bias=bias
        )

    program = kernel_graph(cache, types, body)
    x, weight, bias = rand(3, 6), rand(32, 6), rand(32)
    (q,) = program.run([x, weight, bias, offsets_of([3]), *cache.values([3])], {})
    cache.lengths = [3]
    want = x.double() @ weight.double().T + bias
    np.testing.assert_allclose(q, want[:, :16], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cache.keys(0).flatten(1), want[:, 16:24], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cache.keys(0, 1).flatten(1), want[:, 24:], rtol=1e-5, atol=1e-5)
