"""Loops, branches, subgraphs, buffers, collectives."""

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.graph.weight import Weight

from maxport.engine.evaluator import evaluate

F32 = DType.float32


@pytest.mark.parametrize("times", [0, 1, 5])
def test_while_loop(times, run, cpu):
    def body(count, x):
        def more(i, x):
            return ops.greater(count, i)

        def step(i, x):
            return [i + 1, x * 2]

        return ops.while_loop([ops.constant(0, DType.int64, cpu), x], more, step)

    i, x = run(body, torch.tensor(times), torch.tensor([1.0, 3.0]))
    assert (i.item(), x.tolist()) == (times, [2.0**times, 3.0 * 2**times])


@pytest.mark.parametrize("flag", [True, False])
def test_branch(flag, run):
    def body(flag, x):
        return ops.cond(flag, [x.type], lambda: x + 1, lambda: x * 10)[0]

    got = run(body, torch.tensor(flag), torch.tensor([2.0]))
    assert got.tolist() == ([3.0] if flag else [20.0])


def test_buffer_load_is_a_copy_and_store_is_seen(run):
    buffer = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def body(x, buffer):
        before = ops.buffer_load(buffer)
        ops.buffer_store_slice(buffer, x, [slice(1, 2), slice(0, 2)])
        after = ops.buffer_load(buffer)
        ops.buffer_store(buffer, after * 10)
        return before, after

    before, after = run(body, torch.tensor([[7.0, 8.0]]), buffers=[buffer])
    assert before.tolist() == [[1, 2], [3, 4]]
    assert after.tolist() == [[1, 2], [7, 8]]
    assert buffer.tolist() == [[10, 20], [70, 80]]


def test_unsigned_buffers_are_written_back(cpu):
    with Graph("g", input_types=[BufferType(DType.uint32, [2], cpu)]) as graph:
        buffer = graph.inputs[0].buffer
        ops.buffer_store(buffer, ops.buffer_load(buffer) + 1)
        graph.output()
    value = np.array([1, 2], np.uint32)
    evaluate(graph, [value], {})
    assert value.tolist() == [2, 3]


def test_subgraph_called_twice_with_its_own_weights(cpu):
    """Weights inside a subgraph get the call's prefix."""
    with Graph("g", input_types=[TensorType(F32, ["n", 2], cpu)]) as graph:
        x = graph.inputs[0].tensor
        with graph.add_subgraph("layer", input_types=[x.type]) as layer:
            weight = Weight("w", F32, [2, 2], cpu, _placeholder=True)
            layer.output(layer.inputs[0].tensor @ weight)
        y = ops.call(layer, x, prefix="a.")[0].tensor
        graph.output(ops.call(layer, y, prefix="b.")[0].tensor)
    weights = {"a.w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b.w": torch.eye(2) * 3}
    x = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    (got,) = evaluate(graph, [x], weights)
    assert got.tolist() == (x @ weights["a.w"] * 3).tolist()


def mesh(body, count, per_device, signals=True):
    """A graph over simulated GPUs: one [2, 4] input and one signal buffer per device."""
    devices = [DeviceRef.GPU(i) for i in range(count)]
    types = [TensorType(F32, per_device, device) for device in devices]
    types += [BufferType(DType.uint8, [1], device) for device in devices]
    with Graph("g", input_types=types) as graph:
        tensors = [value.tensor for value in graph.inputs[:count]]
        buffers = [value.buffer for value in graph.inputs[count:]]
        graph.output(*body(tensors, buffers))
    return graph


def run_mesh(graph, shards):
    signals = [torch.zeros(1, dtype=torch.uint8) for _ in shards]
    return evaluate(graph, [*shards, *signals], {})


def test_allreduce(rand):
    shards = [rand(2, 4) for _ in range(3)]
    graph = mesh(lambda t, s: ops.allreduce.sum(t, s), 3, [2, 4])
    for got in run_mesh(graph, shards):
        np.testing.assert_allclose(got, sum(x.numpy() for x in shards), rtol=1e-6)


@pytest.mark.parametrize("group", [None, 2])
def test_allgather(group, rand):
    shards = [rand(2, 4) for _ in range(4)]
    graph = mesh(lambda t, s: ops.allgather(t, s, axis=1, group_size=group), 4, [2, 4])
    size = group or 4
    for device, got in enumerate(run_mesh(graph, shards)):
        first = device // size * size
        want = torch.cat(shards[first : first + size], 1)
        assert got.tolist() == want.tolist()


def test_reducescatter_splits_unevenly(rand):
    shards = [rand(3, 5) for _ in range(2)]
    graph = mesh(lambda t, s: ops.reducescatter.sum(t, s, axis=1), 2, [3, 5])
    first, second = run_mesh(graph, shards)
    want = (shards[0] + shards[1]).numpy()
    np.testing.assert_allclose(first, want[:, :3], rtol=1e-6)
    np.testing.assert_allclose(second, want[:, 3:], rtol=1e-6)


def test_broadcast(rand):
    shards = [rand(2, 4) for _ in range(3)]
    graph = mesh(lambda t, s: ops.distributed_broadcast(t[0], s), 3, [2, 4])
    assert all(got.tolist() == shards[0].tolist() for got in run_mesh(graph, shards))


def test_scatter_gives_each_replica_its_chunk(rand):
    root = DeviceRef.GPU(0)
    types = [TensorType(F32, [2], root)] * 2
    types += [BufferType(DType.uint8, [1], DeviceRef.GPU(i)) for i in range(4)]
    with Graph("g", input_types=types) as graph:
        chunks = [value.tensor for value in graph.inputs[:2]]
        graph.output(*ops.distributed_scatter(chunks, [v.buffer for v in graph.inputs[2:]]))
    a, b = rand(2), rand(2)
    got = evaluate(graph, [a, b, *[torch.zeros(1, dtype=torch.uint8)] * 4], {})
    assert [x.tolist() for x in got] == [a.tolist(), a.tolist(), b.tolist(), b.tolist()]


def test_conv2d_with_groups_padding_and_strides(run, rand):
    x, weight = rand(1, 5, 6, 4), rand(3, 2, 2, 6)
    got = run(
        lambda v, w: ops.conv2d(v, w, stride=(2, 1), padding=(1, 0, 1, 1), groups=2), x, weight
    )
    padded = np.pad(x.numpy(), ((0, 0), (1, 0), (1, 1), (0, 0)))
    want = np.zeros((1, 2, 7, 6))
    for i in range(2):
        for j in range(7):
            for channel in range(6):
                group = channel // 3
                window = padded[0, 2 * i : 2 * i + 3, j : j + 2, 2 * group : 2 * group + 2]
                want[0, i, j, channel] = (window * weight.numpy()[..., channel]).sum()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_pooling(run, rand):
    x = rand(1, 4, 4, 2)
    windows = x.numpy().reshape(1, 2, 2, 2, 2, 2)
    largest = run(lambda v: ops.max_pool2d(v, (2, 2), 2), x)
    np.testing.assert_allclose(largest, windows.max((2, 4)), rtol=1e-6)
    mean = run(lambda v: ops.avg_pool2d(v, (2, 2), 2), x)
    np.testing.assert_allclose(mean, windows.mean((2, 4)), rtol=1e-6)
