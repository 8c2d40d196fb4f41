"""Reductions, softmax, running sums, sorting."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from max.graph import ops

REDUCE = {
    "sum": (ops.sum, np.sum),
    "mean": (ops.mean, np.mean),
    "max": (lambda x, axis: ops.max(x, axis=axis), np.max),
    "min": (lambda x, axis: ops.min(x, axis=axis), np.min),
    "prod": (ops.prod, np.prod) if hasattr(ops, "prod") else (ops.sum, np.sum),
}


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", REDUCE)
def test_reduction_keeps_the_axis(name, axis, run, rand):
    function, formula = REDUCE[name]
    x = rand(2, 3, 4)
    want = formula(x.double().numpy(), axis=axis, keepdims=True)
    np.testing.assert_allclose(run(lambda v: function(v, axis=axis), x), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [0, -1])
def test_argmax_and_argmin_take_the_first(axis, run):
    x = torch.tensor([[1.0, 5.0, 5.0], [5.0, 0.0, 0.0]])
    got = run(lambda v: ops.argmax(v, axis=axis), x)
    assert got.squeeze(axis).tolist() == x.numpy().argmax(axis).tolist()
    got = run(lambda v: ops.argmin(v, axis=axis), x)
    assert got.squeeze(axis).tolist() == x.numpy().argmin(axis).tolist()


def test_softmax_and_logsoftmax(run, rand):
    x = rand(3, 7) * 4
    exponent = np.exp(x.double().numpy() - x.double().numpy().max(-1, keepdims=True))
    want = exponent / exponent.sum(-1, keepdims=True)
    np.testing.assert_allclose(run(ops.softmax, x), want, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(run(ops.logsoftmax, x), np.log(want), rtol=1e-5, atol=1e-6)


def test_softmax_of_half_precision_rounds_once(run):
    x = torch.linspace(-3, 3, 64).to(torch.bfloat16)[None]
    want = torch.softmax(x.double(), -1).to(torch.bfloat16)
    assert torch.equal(run(ops.softmax, x), want)


def test_sum_of_many_bfloat16_accumulates_in_float32(run):
    """In bfloat16 the sum of 1000 ones would stop at 256."""
    x = torch.ones(1000, dtype=torch.bfloat16)
    assert run(lambda v: ops.sum(v, axis=0), x).item() == 1000


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum(exclusive, reverse, run):
    x = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    got = run(lambda v: ops.cumsum(v, axis=1, exclusive=exclusive, reverse=reverse), x)
    order = x.numpy()[:, ::-1] if reverse else x.numpy()
    want = order.cumsum(1) - (order if exclusive else 0)
    assert got.tolist() == (want[:, ::-1] if reverse else want).tolist()


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.integers(1, 3), columns=st.integers(1, 9), data=st.data())
def test_top_k_is_sorted_and_stable(run, rows, columns, data):
    k = data.draw(st.integers(1, columns))
    values = data.draw(
        st.lists(st.integers(-3, 3), min_size=rows * columns, max_size=rows * columns)
    )
    x = torch.tensor(values, dtype=torch.float32).reshape(rows, columns)
    largest, index = run(lambda v: ops.top_k(v, k, axis=-1), x)
    want = np.argsort(-x.numpy(), axis=-1, kind="stable")[:, :k]
    assert index.tolist() == want.tolist()
    assert largest.tolist() == np.take_along_axis(x.numpy(), want, -1).tolist()


def test_bottom_k(run):
    values, index = run(lambda v: ops.bottom_k(v, 2, axis=-1), torch.tensor([3.0, 1.0, 2.0]))
    assert (values.tolist(), index.tolist()) == ([1.0, 2.0], [1, 2])


def test_argsort(run):
    x = torch.tensor([3.0, 1.0, 2.0])
    assert run(ops.argsort, x).tolist() == [1, 2, 0]
    assert run(lambda v: ops.argsort(v, ascending=False), x).tolist() == [0, 2, 1]
