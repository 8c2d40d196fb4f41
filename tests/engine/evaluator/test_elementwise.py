"""Element-wise ops against formulas written with numpy and math."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from max.dtype import DType
from max.graph import ops

erf = np.vectorize(math.erf)
UNARY = {
    "abs": (ops.abs, np.abs),
    "ceil": (ops.ceil, np.ceil) if hasattr(ops, "ceil") else (ops.floor, np.floor),
    "cos": (ops.cos, np.cos),
    "erf": (ops.erf, erf),
    "exp": (ops.exp, np.exp),
    "floor": (ops.floor, np.floor),
    "gelu": (ops.gelu, lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2)))),
    "gelu_tanh": (
        lambda x: ops.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "gelu_quick": (
        lambda x: ops.gelu(x, approximate="quick"),
        lambda x: x / (1 + np.exp(-1.702 * x)),
    ),
    "negate": (ops.negate, np.negative),
    "relu": (ops.relu, lambda x: np.where(x > 0, x, 0)),
    "round": (ops.round, np.round),
    "sigmoid": (ops.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "silu": (ops.silu, lambda x: x / (1 + np.exp(-x))),
    "sin": (ops.sin, np.sin),
    "tanh": (ops.tanh, np.tanh),
    "trunc": (ops.trunc, np.trunc),
}
POSITIVE = {
    "log": (ops.log, np.log),
    "log1p": (ops.log1p, np.log1p),
    "rsqrt": (ops.rsqrt, lambda x: 1 / np.sqrt(x)),
    "sqrt": (ops.sqrt, np.sqrt),
}
BINARY = {
    "add": (ops.add, np.add),
    "sub": (ops.sub, np.subtract),
    "mul": (ops.mul, np.multiply),
    "div": (ops.div, np.divide),
    "max": (ops.max, np.maximum),
    "min": (ops.min, np.minimum),
    "mod": (ops.mod, np.mod),
}
COMPARE = {
    "equal": (ops.equal, np.equal),
    "not_equal": (ops.not_equal, np.not_equal),
    "greater": (ops.greater, np.greater),
    "greater_equal": (ops.greater_equal, np.greater_equal),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name, run, rand):
    function, formula = UNARY[name]
    x = rand(3, 5) * 2
    want = formula(x.double().numpy())
    np.testing.assert_allclose(run(function, x).numpy(), want, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", POSITIVE)
def test_unary_of_positive(name, run, rand):
    function, formula = POSITIVE[name]
    x = rand(4, 3).abs() + 0.01
    want = formula(x.double().numpy())
    np.testing.assert_allclose(run(function, x).numpy(), want, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", BINARY)
def test_binary_broadcasts(name, run, rand):
    function, formula = BINARY[name]
    x, y = rand(2, 3, 4), rand(3, 1) + 3
    want = formula(x.double().numpy(), y.double().numpy())
    np.testing.assert_allclose(run(function, x, y).numpy(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", COMPARE)
def test_comparison(name, run):
    function, formula = COMPARE[name]
    x = torch.tensor([1, 2, 3, 4])
    y = torch.tensor([4, 2, 1, 4])
    assert run(function, x, y).tolist() == formula(x.numpy(), y.numpy()).tolist()


def test_pow_with_float_exponent(run, rand):
    x = rand(6).abs() + 0.1
    got = run(lambda v: ops.pow(v, 1.5), x)
    np.testing.assert_allclose(got.numpy(), x.double().numpy() ** 1.5, rtol=2e-6)


def test_logic(run):
    x, y = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    assert run(ops.logical_and, x, y).tolist() == [True, False, False]
    assert run(ops.logical_or, x, y).tolist() == [True, True, False]
    assert run(ops.logical_xor, x, y).tolist() == [False, True, False]
    assert run(ops.logical_not, x).tolist() == [False, False, True]


def test_nan_and_inf(run):
    x = torch.tensor([1.0, math.nan, math.inf])
    assert run(ops.is_nan, x).tolist() == [False, True, False]
    assert run(ops.is_inf, x).tolist() == [False, False, True]


def test_where_takes_either_side(run):
    condition = torch.tensor([[True], [False]])
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    assert run(ops.where, condition, x, y).tolist() == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("target", [DType.bfloat16, DType.float16, DType.int32, DType.float64])
def test_cast_rounds_as_numpy_or_truncates(target, run):
    x = torch.tensor([1.00390625, -2.7, 3.999, 0.0])
    got = run(lambda v: ops.cast(v, target), x)
    if target == DType.bfloat16:
        bits = x.numpy().view(np.uint32)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        want = even.astype(np.uint32).view(np.float32)
        assert got.float().numpy().tolist() == want.tolist()
    else:
        assert got.numpy().tolist() == x.numpy().astype(target.to_numpy()).tolist()


def test_bfloat16_rounds_after_every_op(run):
    """256 + 1 is not a bfloat16; the sum rounds before the next op sees it."""
    x = torch.tensor([256.0], dtype=torch.bfloat16)
    one = torch.tensor([1.0], dtype=torch.bfloat16)
    assert run(lambda a, b: ops.sub(ops.add(a, b), a), x, one).item() == 0.0


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64]),
)
def test_arithmetic_keeps_shape_and_dtype(run, shape, dtype):
    x = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    got = run(lambda v: ops.sub(ops.mul(v, v), v), x)
    assert got.dtype == dtype
    assert got.tolist() == (x * x - x).tolist()
