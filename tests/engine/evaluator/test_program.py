"""What a program promises beyond the ops: errors, recording, substitution, reuse."""

import numpy as np
import pytest
import torch
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph, TensorType, ops

from maxport.engine.evaluator import KERNELS, OPS, Program, Recording, evaluate
from maxport.errors import MaxportError

F32 = DType.float32


@pytest.fixture
def layer(cpu):
    """A small layer with two weights and a symbolic size."""
    with Graph("layer", input_types=[TensorType(F32, ["n", 4], cpu)]) as graph:
        x = graph.inputs[0].tensor
        weight = ops.constant_external("block.0.proj.weight", TensorType(F32, [3, 4], cpu))
        norm = ops.constant_external("block.0.norm.weight", TensorType(F32, [3], cpu))
        y = x @ ops.transpose(weight, 0, 1)
        graph.output(ops.rms_norm(y, norm, 1e-5))
    return graph


@pytest.fixture
def weights(rand):
    return {"block.0.proj.weight": rand(3, 4), "block.0.norm.weight": rand(3)}


def test_unknown_op_is_named_with_its_module(layer, monkeypatch):
    monkeypatch.delitem(OPS, "matmul")
    with pytest.raises(MaxportError) as error:
        Program(layer)
    assert "no function for matmul" in str(error.value)
    assert "block.0.proj" in error.value.where


def test_unknown_kernel_is_named(cpu, monkeypatch):
    with Graph("g", input_types=[TensorType(F32, [2], cpu)]) as graph:
        graph.output(ops.argsort(graph.inputs[0].tensor))
    monkeypatch.delitem(KERNELS, "mx.argsort")
    with pytest.raises(MaxportError, match=r"no function for mx.argsort"):
        Program(graph)


def test_too_few_inputs_names_the_unbound_ones(layer, weights):
    with pytest.raises(
        MaxportError, match=r"takes 1 inputs, 0 were given; unbound: .*float32\[n, 4\]"
    ):
        evaluate(layer, [], weights)


def test_none_is_an_unbound_input(layer, weights):
    with pytest.raises(MaxportError, match=r"is unbound"):
        evaluate(layer, [None], weights)


def test_wrong_shape_and_dtype_of_an_input(layer, weights):
    with pytest.raises(MaxportError, match=r"has shape \[2, 5\], the graph wants float32\[n, 4\]"):
        evaluate(layer, [torch.zeros(2, 5)], weights)
    with pytest.raises(MaxportError, match=r"is torch.float64, the graph wants float32"):
        evaluate(layer, [torch.zeros(2, 4).double()], weights)


def test_sizes_of_one_name_must_agree(cpu):
    kind = TensorType(F32, ["n"], cpu)
    with Graph("g", input_types=[kind, kind]) as graph:
        graph.output(graph.inputs[0].tensor + graph.inputs[1].tensor)
    with pytest.raises(MaxportError, match=r"has shape \[3\], .* where \{'n': 2\}"):
        evaluate(graph, [torch.zeros(2), torch.zeros(3)], {})


def test_missing_weight_suggests_the_closest_name(layer, weights):
    weights["block.0.proj.wait"] = weights.pop("block.0.proj.weight")
    with pytest.raises(MaxportError, match=r"weight block.0.proj.weight was not given") as error:
        evaluate(layer, [torch.zeros(1, 4)], weights)
    assert "block.0.proj.wait" in error.value.fix


def test_wrong_weight_shape_and_dtype(layer, weights):
    bad = {**weights, "block.0.norm.weight": torch.zeros(4)}
    with pytest.raises(MaxportError, match=r"block.0.norm.weight has shape \[4\]"):
        evaluate(layer, [torch.zeros(1, 4)], bad)
    bad = {**weights, "block.0.norm.weight": torch.zeros(3).bfloat16()}
    with pytest.raises(MaxportError, match=r"block.0.norm.weight is torch.bfloat16"):
        evaluate(layer, [torch.zeros(1, 4)], bad)


def test_a_failing_op_names_itself_and_its_source_line(cpu):
    before = InferenceSession.debug.source_tracebacks
    InferenceSession.debug.source_tracebacks = True
    try:
        with Graph(
            "g", input_types=[TensorType(F32, [2], cpu), TensorType(DType.int64, [1], cpu)]
        ) as graph:
            x, index = (value.tensor for value in graph.inputs)
            graph.output(ops.gather(x, index, axis=0))
    finally:
        InferenceSession.debug.source_tracebacks = before
    with pytest.raises(MaxportError, match=r"gather failed on operands") as error:
        evaluate(graph, [torch.zeros(2), torch.tensor([9])], {})
    assert "test_program.py" in error.value.where


def test_recording_by_name_module_and_index(layer, weights, rand):
    program, x = Program(layer), rand(2, 4)
    by_name = Recording(names=["matmul"])
    program.run([x], weights, record=by_name)
    ((node, (value,)),) = by_name.values
    np.testing.assert_allclose(value, x @ weights["block.0.proj.weight"].T, rtol=1e-5)
    assert node.module == "block.0.proj"
    by_module = Recording(modules=["block.0.norm"])
    program.run([x], weights, record=by_module)
    assert "reduce.rms_norm" in {node.name for node, _ in by_module.values}
    by_index = Recording(indices=[node.index])
    program.run([x], weights, record=by_index)
    assert [n.index for n, _ in by_index.values] == [node.index]


def test_substituted_value_flows_on(layer, weights, rand):
    program, x = Program(layer), rand(2, 4)
    (node,) = [node for node in program.nodes if node.name == "matmul"]
    value = torch.tensor([[3.0, 0.0, 4.0], [1.0, 1.0, 1.0]])
    (got,) = program.run([x], weights, substitute={node.index: value})
    root = (value.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    np.testing.assert_allclose(got, value / root * weights["block.0.norm.weight"], rtol=1e-5)


def test_a_program_runs_again_at_other_sizes(layer, weights, rand):
    program = Program(layer)
    for size in (1, 3, 2):
        x = rand(size, 4)
        (got,) = program.run([x], weights)
        assert torch.equal(got, evaluate(layer, [x], weights)[0])


def test_weights_are_used_as_given_in_every_run(layer, weights, rand):
    """Nothing that depends on weights is remembered from an earlier run."""
    program, x = Program(layer), rand(2, 4)
    (first,) = program.run([x], weights)
    weights["block.0.norm.weight"] *= 2
    (second,) = program.run([x], weights)
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6)


def test_constants_are_computed_once_and_right_each_time(cpu):
    with Graph("g", input_types=[TensorType(F32, [3], cpu)]) as graph:
        table = ops.cos(ops.range(0, 3, 1, dtype=F32, device=cpu))
        graph.output(graph.inputs[0].tensor * table)
    program = Program(graph)
    for scale in (1.0, 2.0):
        (got,) = program.run([torch.full((3,), scale)], {})
        np.testing.assert_allclose(got, scale * np.cos(np.arange(3)), rtol=1e-6)


def test_inputs_and_weights_may_be_numpy_or_driver_buffers(layer, weights, rand):
    x = rand(2, 4)
    (want,) = evaluate(layer, [x], weights)
    arrays = {name: value.numpy() for name, value in weights.items()}
    (got,) = evaluate(layer, [x.numpy()], arrays)
    assert torch.equal(got, want)
    buffers = {name: Buffer.from_numpy(value) for name, value in arrays.items()}
    (got,) = evaluate(layer, [Buffer.from_numpy(x.numpy())], buffers)
    assert torch.equal(got, want)


def test_widened_run_has_no_bfloat16_rounding(cpu, rand):
    kind = TensorType(DType.bfloat16, [8, 8], cpu)
    with Graph("g", input_types=[kind]) as graph:
        weight = ops.constant_external("w", kind)
        y = ops.silu(graph.inputs[0].tensor @ weight)
        graph.output(
            ops.rms_norm(y, ops.constant(1.0, DType.bfloat16, cpu).broadcast_to([8]), 1e-6)
        )
    x, weight = rand(8, 8).bfloat16(), rand(8, 8).bfloat16()
    y = torch.nn.functional.silu(x.double() @ weight.double())
    want = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    (rounded,) = evaluate(graph, [x], {"w": weight})
    (wide,) = Program(graph, widen=True).run([x], {"w": weight})
    assert rounded.dtype == torch.bfloat16
    np.testing.assert_allclose(wide, want, rtol=1e-5, atol=1e-6)
    assert (rounded - want).abs().max() > 1e-3


def test_float8_may_be_carried_without_its_rounding(cpu, rand):
    kinds = [TensorType(F32, [3], cpu), TensorType(DType.float8_e4m3fn, [3], cpu)]
    with Graph("g", input_types=kinds) as graph:
        x, y = (value.tensor for value in graph.inputs)
        graph.output(ops.cast(ops.cast(x, DType.float8_e4m3fn), F32), ops.cast(y, F32))
    x, y = rand(3), rand(3).to(torch.float8_e4m3fn)
    rounded, read = Program(graph).run([x, y], {})
    assert torch.equal(rounded, x.to(torch.float8_e4m3fn).float())
    assert torch.equal(read, y.float())
    kept, read = Program(graph, widen=True, widen_float8=True).run([x, y], {})
    assert torch.equal(kept, x)
    assert torch.equal(read, y.float())


def test_constants_of_every_dtype(cpu):
    values = {
        DType.float32: [1.5, -2.0],
        DType.bfloat16: [1.5, -2.0],
        DType.float16: [0.5, 3.0],
        DType.int32: [1, -7],
        DType.uint32: [1, 4_000_000_000],
        DType.uint8: [0, 255],
        DType.bool: [True, False],
    }
    with Graph("g", input_types=[]) as graph:
        graph.output(*[ops.constant(v, dtype, cpu) for dtype, v in values.items()])
    for got, want in zip(evaluate(graph, [], {}), values.values(), strict=True):
        assert got.tolist() == want


def test_inputs_and_weights_are_listed(layer):
    program = Program(layer)
    assert [str(spec) for _, spec in program.inputs] == ["float32[n, 4]"]
    assert {name: str(spec) for name, spec in program.weights.items()} == {
        "block.0.proj.weight": "float32[3, 4]",
        "block.0.norm.weight": "float32[3]",
    }
