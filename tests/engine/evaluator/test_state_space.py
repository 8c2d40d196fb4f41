"""Recurrent kernels against one token at a time."""

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import ops
from max.nn import state_space

SLOTS = torch.tensor([2, 0], dtype=torch.uint32)
OFFSETS = torch.tensor([0, 3, 5], dtype=torch.uint32)
SPANS = ((2, 0, 3), (0, 3, 5))


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_causal_conv1d_varlen(channels_last, residual, run, rand):
    x, weight, bias, pool = rand(4, 5), rand(4, 3), rand(4), rand(3, 4, 2)
    before = pool.clone()
    fresh = torch.tensor([True, False])

    def body(x, weight, bias, fresh, slots, starts, pool):
        return state_space.causal_conv1d_varlen_fwd(
            x,
            weight,
            bias,
            pool,
            ops.cast(starts, DType.int32),
            slots,
            fresh,
            channels_last=channels_last,
            use_residual=residual,
        )

    given = x.T.contiguous() if channels_last else x
    got = run(body, given, weight, bias, fresh, SLOTS, OFFSETS, buffers=[pool])
    got = got.T if channels_last else got
    for (slot, first, last), has_state in zip(SPANS, fresh.tolist(), strict=True):
        history = before[slot].numpy() if has_state else np.zeros((4, 2))
        window = np.concatenate([history, x[:, first:last].numpy()], 1)
        for t in range(last - first):
            value = (weight.numpy() * window[:, t : t + 3]).sum(1) + bias.numpy()
            value = value + (x[:, first + t].numpy() if residual else 0)
            np.testing.assert_allclose(got[:, first + t], silu(value), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pool[slot], window[:, -2:])
    assert torch.equal(pool[1], before[1])


def test_gated_delta_conv(run, rand):
    x, weight, pool = rand(5, 4), rand(4, 3), rand(3, 4, 2)
    before = pool.clone()

    def body(x, weight, slots, offsets, pool):
        return state_space.gated_delta_conv1d_fwd(x, weight, pool, slots, offsets)

    got = run(body, x, weight, SLOTS, OFFSETS, buffers=[pool])
    for slot, first, last in SPANS:
        window = np.concatenate([before[slot].numpy().T, x[first:last].numpy()])
        for t in range(last - first):
            want = (weight.numpy().T * window[t : t + 3]).sum(0)
            np.testing.assert_allclose(got[first + t], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pool[slot].T, window[-2:])


def test_gated_delta_rule(run, rand):
    key_heads, heads, key_dim, value_dim = 2, 4, 3, 5
    qkv = rand(5, 2 * key_heads * key_dim + heads * value_dim)
    decay, beta = torch.sigmoid(rand(5, heads)), torch.sigmoid(rand(5, heads))
    pool = rand(3, heads, key_dim, value_dim)
    before = pool.double().numpy().copy()

    def body(qkv, decay, beta, slots, offsets, pool):
        return state_space.gated_delta_recurrence_fwd(qkv, decay, beta, pool, slots, offsets)

    got = run(body, qkv, decay, beta, SLOTS, OFFSETS, buffers=[pool])
    size = key_heads * key_dim
    for slot, first, last in SPANS:
        state = before[slot]
        for t in range(first, last):
            row = qkv[t].double().numpy()
            for h in range(heads):
                g = h // (heads // key_heads)
                q = row[:size].reshape(key_heads, key_dim)[g]
                k = row[size : 2 * size].reshape(key_heads, key_dim)[g]
                v = row[2 * size :].reshape(heads, value_dim)[h]
                q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(key_dim)
                k = k / np.sqrt(k @ k + 1e-6)
                state[h] *= float(decay[t, h])
                state[h] += np.outer(k, (v - k @ state[h]) * float(beta[t, h]))
                want = q @ state[h]
                part = got[t].reshape(heads, value_dim)[h]
                np.testing.assert_allclose(part, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(pool[slot], state, rtol=1e-4, atol=1e-5)


def test_mamba2_scan(run, rand):
    heads, dim, groups, size = 4, 3, 2, 5
    x, dt, a = rand(5, heads, dim), rand(5, heads), -rand(heads).abs()
    b, c = rand(5, groups, size), rand(5, groups, size)
    d, dt_bias, pool = rand(heads), rand(heads), rand(3, heads, dim, size)
    before = pool.double().numpy().copy()
    has_state = torch.tensor([True, False])

    def body(x, dt, a, b, c, d, dt_bias, has_state, slots, starts, pool):
        return state_space.mamba2_ssd_chunk_scan_varlen_fwd_inplace(
            x, dt, a, b, c, d, dt_bias, pool, ops.cast(starts, DType.int32), has_state, slots
        )

    got = run(body, x, dt, a, b, c, d, dt_bias, has_state, SLOTS, OFFSETS, buffers=[pool])
    for (slot, first, last), known in zip(SPANS, has_state.tolist(), strict=True):
        state = before[slot] if known else np.zeros_like(before[slot])
        for t in range(first, last):
            for h in range(heads):
                g = h // (heads // groups)
                step = np.log1p(np.exp(float(dt[t, h] + dt_bias[h])))
                state[h] = state[h] * np.exp(step * float(a[h])) + step * np.outer(
                    x[t, h].numpy(), b[t, g].numpy()
                )
                want = state[h] @ c[t, g].numpy() + float(d[h]) * x[t, h].numpy()
                np.testing.assert_allclose(got[t, h], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(pool[slot], state, rtol=1e-4, atol=1e-5)


def test_gated_group_norm(run, rand):
    y, gate, weight = rand(3, 8), rand(3, 8), rand(8)
    got = run(lambda y, g, w: state_space.gated_group_rmsnorm(y, g, w, 1e-3, 4), y, gate, weight)
    gated = y.double().numpy() * silu(gate.double().numpy())
    groups = gated.reshape(3, 2, 4)
    normal = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(got, normal.reshape(3, 8) * weight.numpy(), rtol=1e-5, atol=1e-6)
