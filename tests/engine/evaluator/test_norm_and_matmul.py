"""Norms and matrix products against float64 formulas."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from max.dtype import DType
from max.graph import ops


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("before", [False, True])
def test_rms_norm(offset, before, run, rand):
    x, weight = rand(4, 8), rand(8)
    got = run(
        lambda v, w: ops.rms_norm(v, w, 1e-3, weight_offset=offset, multiply_before_cast=before),
        x,
        weight,
    )
    wide = x.double().numpy()
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * (weight.numpy() + offset)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_rms_norm_rounds_before_or_after_the_weight(run, rand):
    """In bfloat16 the two orders give different values, as they do in MAX."""
    x, weight = rand(64, 16).bfloat16(), (rand(16) + 1).bfloat16()
    results = {}
    for before in (False, True):
        results[before] = run(
            lambda v, w, b=before: ops.rms_norm(v, w, 1e-6, multiply_before_cast=b), x, weight
        )
    normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(results[True], (normal * weight.float()).bfloat16())
    assert torch.equal(results[False], normal.bfloat16() * weight)
    assert not torch.equal(results[True], results[False])


def test_layer_norm(run, rand):
    x, gamma, beta = rand(3, 8), rand(8), rand(8)
    got = run(lambda v, g, b: ops.layer_norm(v, g, b, 1e-4), x, gamma, beta)
    wide = x.double().numpy()
    spread = wide.var(-1, keepdims=True)
    want = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(spread + 1e-4) * gamma.numpy()
    np.testing.assert_allclose(got, want + beta.numpy(), rtol=1e-5, atol=1e-5)


def test_group_norm(run, rand):
    x, gamma, beta = rand(2, 6, 5), rand(6), rand(6)
    got = run(lambda v, g, b: ops.group_norm(v, g, b, num_groups=3, epsilon=1e-4), x, gamma, beta)
    groups = x.double().numpy().reshape(2, 3, 10)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(
        groups.var(-1, keepdims=True) + 1e-4
    )
    want = normal.reshape(2, 6, 5) * gamma.numpy()[:, None] + beta.numpy()[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    rows=st.integers(0, 4),
    inner=st.integers(1, 5),
    columns=st.integers(1, 4),
)
def test_matmul_shapes(run, batch, rows, inner, columns):
    generator = torch.Generator().manual_seed(rows + inner)
    a = torch.randn(*batch, rows, inner, generator=generator)
    b = torch.randn(*batch, inner, columns, generator=generator)
    want = a.double().numpy() @ b.double().numpy()
    np.testing.assert_allclose(run(ops.matmul, a, b), want, rtol=1e-5, atol=1e-5)


def test_matmul_broadcasts_batches(run, rand):
    a, b = rand(2, 3, 4), rand(4, 5)
    np.testing.assert_allclose(run(ops.matmul, a, b), a.numpy() @ b.numpy(), rtol=1e-5, atol=1e-5)


def test_matmul_in_bfloat16_rounds_once(run, rand):
    a, b = rand(8, 64).bfloat16(), rand(64, 8).bfloat16()
    exact = (a.double() @ b.double()).bfloat16()
    got = run(ops.matmul, a, b)
    assert (got - exact).abs().max() <= exact.abs().max() * 2**-7
    assert got.dtype == torch.bfloat16


def test_outer(run):
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])
    assert run(ops.outer, a, b).tolist() == np.outer(a, b).tolist()


def test_float64_stays_float64(run, rand):
    x = rand(3, 4).double()
    got = run(lambda v: ops.rms_norm(v, ops.constant(np.ones(4), DType.float64, v.device), 1e-6), x)
    want = x.numpy() / np.sqrt((x.numpy() ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-14)
