"""Mixture-of-experts kernels against per-token loops."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from max.dtype import DType
from max.graph import DeviceRef, ops
from max.nn import kernels
from max.nn.activation import GatedActivation
from max.nn.comm.ep.ep_kernels import fused_silu

QUICK = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@QUICK
@given(experts=st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_create_indices_groups_slots_by_expert(run, experts):
    ids = torch.tensor(experts, dtype=torch.int32)
    order, starts, restore, groups, stats = run(lambda v: kernels.moe_create_indices(v, 5), ids)
    counts = np.bincount(experts, minlength=5)
    assert starts.tolist() == [0, *counts.cumsum()]
    assert [experts[slot] for slot in order] == sorted(experts)
    assert order[restore].tolist() == list(range(len(experts)))
    assert groups.tolist() == [0, 1, 2, 3, 4]
    assert stats.tolist() == [counts.max(), 5]


@QUICK
@given(
    tokens=st.integers(1, 5), k=st.integers(1, 3), experts=st.integers(3, 5), seed=st.integers(0, 9)
)
def test_a_whole_expert_layer(run, tokens, k, experts, seed):
    """Sort, grouped product, unsort and weighted sum equal one expert at a time."""
    rng = np.random.default_rng(seed)
    x = torch.tensor(rng.normal(size=(tokens, 4)), dtype=torch.float32)
    weight = torch.tensor(rng.normal(size=(experts, 3, 4)), dtype=torch.float32)
    chosen = torch.tensor(
        np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]), dtype=torch.int32
    )
    share = torch.tensor(rng.random((tokens, k)), dtype=torch.float32)

    def body(x, weight, chosen, share):
        flat = ops.reshape(chosen, [-1])
        order, starts, restore, ids, stats = kernels.moe_create_indices(flat, experts)
        token = ops.cast(order, DType.int32) // k
        rows = ops.gather(x, ops.cast(token, DType.int32), axis=0)
        y = kernels.grouped_matmul_ragged(rows, weight, starts, ids, stats)
        return kernels.moe_finalize(y, restore, share, DType.float32)

    got = run(body, x, weight, chosen, share)
    want = np.zeros((tokens, 3))
    for t in range(tokens):
        for slot in range(k):
            expert = int(chosen[t, slot])
            want[t] += float(share[t, slot]) * (weight[expert].double() @ x[t].double()).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def top(values, k):
    return sorted(range(len(values)), key=lambda i: -values[i])[:k]


def test_single_group_router(run, rand):
    scores, bias = torch.sigmoid(rand(4, 8)), rand(8)

    def body(s, b):
        return kernels.moe_router_group_limited(s, b, 8, 3, 1, 1, True, 2.5)

    chosen, weights = run(body, scores, bias)
    for t in range(4):
        want = top((scores[t] + bias).tolist(), 3)
        assert sorted(chosen[t].tolist()) == sorted(want)
        total = sum(float(scores[t, e]) for e in want)
        for slot, expert in enumerate(chosen[t].tolist()):
            assert float(weights[t, slot]) == pytest.approx(2.5 * float(scores[t, expert]) / total)


@pytest.mark.parametrize("norm", [True, False])
def test_group_limited_router(norm, run, rand):
    scores, bias = torch.sigmoid(rand(6, 12)), rand(12) * 0.1

    def body(s, b):
        return kernels.moe_router_group_limited(s, b, 12, 3, 4, 2, norm, 1.5)

    chosen, weights = run(body, scores, bias)
    for t in range(6):
        biased = (scores[t] + bias).tolist()
        rating = [sum(sorted(biased[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
        allowed = [e for e in range(12) if e // 3 in top(rating, 2)]
        want = sorted(allowed, key=lambda e: -biased[e])[:3]
        assert sorted(chosen[t].tolist()) == sorted(want)
        total = sum(float(scores[t, e]) for e in want) if norm else 1.0
        for slot, expert in enumerate(chosen[t].tolist()):
            assert float(weights[t, slot]) == pytest.approx(
                1.5 * float(scores[t, expert]) / total, rel=1e-5
            )


def test_sink_router_shares_one_softmax_with_the_shared_experts(run, rand):
    logits, bias, scale = rand(3, 34), rand(32), torch.tensor([0.7])

    def body(logits, bias, scale):
        return kernels.moe_sink_gate_router(logits, bias, scale, 32, 2, 2, 3.0)

    chosen, weights, sinks = run(body, logits, bias, scale)
    for t in range(3):
        sigmoid = 1 / (1 + np.exp(-logits[t].double().numpy()))
        want = top((sigmoid[:32] + bias.double().numpy()).tolist(), 2)
        assert sorted(chosen[t].tolist()) == sorted(want)
        both = np.array([*sigmoid[chosen[t].numpy()], *sigmoid[32:]])
        share = both / both.sum() * 3.0 * 0.7
        got = [*weights[t].tolist(), *sinks[t].tolist()]
        np.testing.assert_allclose(got, share, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "activation",
    [
        GatedActivation(),
        GatedActivation(limit=0.5),
        GatedActivation("swigluoai", alpha=1.702, limit=7.0),
        GatedActivation("gelu_tanh"),
    ],
    ids=lambda a: f"{a.fused_activation} {a.limit}",
)
def test_gated_activation(activation, interleaved, run, rand):
    x = rand(4, 8)
    offsets = torch.tensor([0, 4], dtype=torch.uint32)
    got = run(
        lambda v, o: fused_silu(v, o, interleaved=interleaved, activation=activation), x, offsets
    )
    wide = x.double().numpy()
    gate, up = (wide[:, 0::2], wide[:, 1::2]) if interleaved else (wide[:, :4], wide[:, 4:])
    if activation.fused_activation == "gelu_tanh":
        want = 0.5 * gate * (1 + np.tanh(0.7978845608028654 * (gate + 0.044715 * gate**3))) * up
    elif activation.fused_activation == "swigluoai":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        want = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    else:
        if activation.limit:
            gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
        want = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_shard_and_stack(axis, count, run, rand):
    a, b = rand(4, 6), rand(4, 6)
    got = run(lambda x, y: ops.shard_and_stack([x, y], [DeviceRef.CPU()] * count, axis=axis), a, b)
    got = [got] if count == 1 else got
    for device in range(count):
        want = [np.split(x.numpy(), count, axis)[device] for x in (a, b)]
        assert got[device].tolist() == np.stack(want).tolist()
