"""Gather and scatter against numpy's fancy indexing."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from max.graph import ops


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(axis=st.integers(-3, 2), index=st.lists(st.integers(0, 1), min_size=1, max_size=4))
def test_gather_any_axis(run, axis, index):
    x = torch.arange(24).reshape(2, 3, 4)
    got = run(lambda v, i: ops.gather(v, i, axis=axis), x, torch.tensor(index))
    assert got.tolist() == np.take(x.numpy(), index, axis=axis).tolist()


def test_gather_with_a_matrix_of_indices_and_negative_ones(run):
    x = torch.arange(6).reshape(3, 2)
    index = torch.tensor([[0, -1], [2, 1]])
    got = run(lambda v, i: ops.gather(v, i, axis=0), x, index)
    assert got.tolist() == x.numpy()[index.numpy()].tolist()


@pytest.mark.parametrize("batch", [0, 1])
def test_gather_nd(batch, run):
    x = torch.arange(24).reshape(2, 3, 4)
    index = torch.tensor([[[2], [0]], [[1], [1]]]) if batch else torch.tensor([[1, 2], [0, 0]])
    got = run(lambda v, i: ops.gather_nd(v, i, batch_dims=batch), x, index)
    if batch:
        want = [[x[b, index[b, n, 0]].tolist() for n in range(2)] for b in range(2)]
    else:
        want = [x[1, 2].tolist(), x[0, 0].tolist()]
    assert got.tolist() == want


def test_scatter_replaces(run):
    x, updates = torch.zeros(2, 4), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    index = torch.tensor([[3, 0], [1, 2]])
    got = run(lambda v, u, i: ops.scatter(v, u, i, axis=1), x, updates, index)
    assert got.tolist() == [[2, 0, 0, 1], [0, 3, 4, 0]]


@pytest.mark.parametrize("name", ["add", "max", "min", "mul"])
def test_scatter_combines(name, run):
    function = getattr(ops, f"scatter_{name}")
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply}[name]
    x = torch.tensor([[1.0, 2.0, 3.0]])
    updates, index = torch.tensor([[5.0, -2.0, 0.5]]), torch.tensor([[1, 1, 2]])
    want = x.numpy().copy()
    combine.at(want, (0, index.numpy()[0]), updates.numpy()[0])
    got = run(lambda v, u, i: function(v, u, i, axis=1), x, updates, index)
    assert got.tolist() == want.tolist()


def test_scatter_nd(run):
    x = torch.zeros(3, 2)
    updates, index = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2], [0]])
    got = run(lambda v, u, i: ops.scatter_nd(v, u, i), x, updates, index)
    assert got.tolist() == [[3, 4], [0, 0], [1, 2]]


@pytest.mark.parametrize("name", ["add", "max", "min", "mul"])
def test_scatter_nd_combines(name, run):
    function = getattr(ops, f"scatter_nd_{name}")
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply}[name]
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    updates, index = torch.tensor([[2.0, -1.0], [0.5, 5.0]]), torch.tensor([[1], [1]])
    want = x.numpy().copy()
    combine.at(want, index.numpy()[:, 0], updates.numpy())
    got = run(lambda v, u, i: function(v, u, i), x, updates, index)
    assert got.tolist() == want.tolist()


def test_nonzero_has_a_size_that_data_decides(run):
    x = torch.tensor([[0, 1], [2, 0]])
    got = run(lambda v: ops.nonzero(v, "count"), x)
    assert got.tolist() == [[0, 1], [1, 0]]
