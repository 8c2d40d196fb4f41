"""Reshaping, slicing, joining and padding against numpy's own indexing."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from max.dtype import DType
from max.graph import Dim, Graph, TensorType, ops

from maxport.engine.evaluator import evaluate

X = torch.arange(2 * 3 * 4).reshape(2, 3, 4)


def test_reshape_permute_squeeze(run):
    got = run(lambda v: ops.reshape(ops.permute(v, [2, 0, 1]), [4, 6]), X)
    assert got.tolist() == X.numpy().transpose(2, 0, 1).reshape(4, 6).tolist()
    assert run(lambda v: ops.squeeze(ops.unsqueeze(v, 1), 1), X).tolist() == X.tolist()
    assert run(lambda v: ops.transpose(v, 0, 2), X).tolist() == X.numpy().swapaxes(0, 2).tolist()


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(1, None)),
        (slice(None), slice(None, -1), slice(0, 4, 2)),
        (slice(1, 2), slice(0, 0)),
        (Ellipsis, 1),
        (0, slice(None), -1),
    ],
)
def test_slices_like_numpy(index, run):
    assert run(lambda v: v[index], X).tolist() == X.numpy()[index].tolist()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_slice_like_numpy(run, data):
    size = data.draw(st.integers(1, 7))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    step = data.draw(st.integers(1, 3))
    x = torch.arange(size * 2).reshape(size, 2)
    got = run(lambda v: v[start:stop:step], x)
    assert got.tolist() == x.numpy()[start:stop:step].tolist()


def test_concat_split_stack(run):
    assert run(lambda v: ops.concat([v, v], axis=1), X).shape == (2, 6, 4)
    parts = run(lambda v: ops.split(v, [1, 3], axis=2), X)
    assert [p.tolist() for p in parts] == [X[..., :1].tolist(), X[..., 1:].tolist()]
    assert run(lambda v: ops.stack([v, v], axis=-1), X).tolist() == np.stack([X, X], -1).tolist()
    chunks = run(lambda v: ops.chunk(v, 2, axis=2), X)
    assert [c.tolist() for c in chunks] == [X[..., :2].tolist(), X[..., 2:].tolist()]


def test_broadcast_and_tile(run):
    row = torch.tensor([[1, 2]])
    assert run(lambda v: ops.broadcast_to(v, [3, 2]), row).tolist() == [[1, 2]] * 3
    assert run(lambda v: ops.tile(v, [2, 3]), row).tolist() == np.tile(row, (2, 3)).tolist()


def test_pad(run):
    x = torch.tensor([[1.0, 2.0, 3.0]])
    constant = run(lambda v: ops.pad(v, [1, 0, 0, 2], value=9.0), x)
    assert constant.tolist() == np.pad(x, ((1, 0), (0, 2)), constant_values=9.0).tolist()
    mirrored = run(lambda v: ops.pad(v, [0, 0, 2, 1], mode="reflect"), x)
    assert mirrored.tolist() == np.pad(x, ((0, 0), (2, 1)), mode="reflect").tolist()
    repeated = run(lambda v: ops.pad(v, [0, 0, 2, 1], mode="edge"), x)
    assert repeated.tolist() == np.pad(x, ((0, 0), (2, 1)), mode="edge").tolist()


@pytest.mark.parametrize("dtype", [DType.int64, DType.float32])
def test_range(dtype, run, cpu):
    got = run(lambda v: ops.range(1, 10, 3, dtype=dtype, device=cpu), X)
    assert got.tolist() == [1, 4, 7]


def test_range_over_a_symbolic_size(cpu):
    with Graph("g", input_types=[TensorType(DType.float32, ["n"], cpu)]) as graph:
        n = graph.inputs[0].tensor.shape[0]
        graph.output(ops.range(0, n, 1, out_dim=n, dtype=DType.int32, device=cpu))
    for size in (0, 1, 5):
        assert evaluate(graph, [torch.zeros(size)], {})[0].tolist() == list(range(size))


def test_shape_to_tensor_resolves_expressions(cpu):
    with Graph("g", input_types=[TensorType(DType.float32, ["n", "m"], cpu)]) as graph:
        n, m = graph.inputs[0].tensor.shape
        graph.output(ops.shape_to_tensor([n + 1, m * 2, Dim(7)]))
    assert evaluate(graph, [torch.zeros(3, 5)], {})[0].tolist() == [4, 10, 7]


def test_band_part(run):
    x = torch.ones(4, 4)
    lower = run(lambda v: ops.band_part(v, num_lower=None, num_upper=0), x)
    assert lower.tolist() == np.tril(np.ones((4, 4))).tolist()
    above = run(lambda v: ops.band_part(v, num_lower=None, num_upper=0, exclude=True), x)
    assert above.tolist() == np.triu(np.ones((4, 4)), 1).tolist()


def test_repeat_interleave(run):
    x = torch.tensor([[1, 2], [3, 4]])
    got = run(lambda v: ops.repeat_interleave(v, 2, axis=1), x)
    assert got.tolist() == np.repeat(x.numpy(), 2, 1).tolist()


def test_reshape_keeps_symbolic_sizes(cpu):
    with Graph("g", input_types=[TensorType(DType.float32, ["n", 6], cpu)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(ops.reshape(x, [x.shape[0] * 2, 3]))
    assert evaluate(graph, [torch.zeros(5, 6)], {})[0].shape == (10, 3)
