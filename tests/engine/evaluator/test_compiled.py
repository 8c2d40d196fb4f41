"""The evaluator against MAX's compiled CPU kernels: several graphs, one compile.

Kernels that are wrong on CPU in MAX 26.7 are left out here; bench/upstream reproduces them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from max.driver import CPU as HOST
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, Graph, Module, TensorType, ops
from max.nn import kernels, state_space
from max.nn.attention import MHAMaskVariant as Mask
from paged import CPU, Cache, offsets_of

from maxport.engine.evaluator import Program

pytestmark = pytest.mark.compiled
F32, I64 = DType.float32, DType.int64
COUNTS, HEADS, KV_HEADS, DIM = [12, 150, 7], 4, 2, 32


def f32(*shape):
    return TensorType(F32, list(shape), CPU)


def elementwise(x, y, weight, bias):
    """Arithmetic, activations, norms, reductions and casts."""
    positive = ops.abs(x) + 0.1
    unary = [ops.cos, ops.sin, ops.exp, ops.tanh, ops.sigmoid, ops.silu, ops.gelu, ops.erf]
    outputs = [function(x) for function in unary]
    outputs += [ops.gelu(x, approximate="tanh"), ops.gelu(x, approximate="quick")]
    outputs += [ops.log(positive), ops.log1p(positive), ops.rsqrt(positive), ops.sqrt(positive)]
    outputs += [ops.floor(x), ops.trunc(x), ops.round(x), ops.relu(x)]
    outputs += [x + y, x - y, x * y, x / (ops.abs(y) + 1), ops.max(x, y), ops.min(x, y)]
    outputs += [ops.mod(positive, ops.abs(y) + 0.5), ops.pow(positive, 1.7)]
    outputs += [ops.cast(ops.greater(x, y), F32), ops.where(ops.greater_equal(x, y), x, y)]
    outputs += [ops.rms_norm(x, weight, 1e-5), ops.layer_norm(x, weight, bias, 1e-5)]
    outputs += [ops.rms_norm(x, weight, 1e-5, weight_offset=1.0, multiply_before_cast=True)]
    outputs += [ops.sum(x, axis=1), ops.mean(x, axis=0), ops.max(x, axis=1), ops.min(x, axis=0)]
    outputs += [ops.softmax(x), ops.logsoftmax(x), ops.argmax(x, axis=1)]
    outputs += [ops.cast(ops.cast(x, DType.bfloat16) * ops.cast(y, DType.bfloat16), F32)]
    outputs += [ops.cast(x * 10, DType.int32), ops.matmul(x, ops.transpose(y, 0, 1))]
    return outputs


def movement(x, index):
    """Slices, joins, gathers, scatters, sorts, convolution."""
    values, order = ops.top_k(x, 3, axis=-1)
    wide = ops.reshape(x, [1, 4, 6, 1])
    kernel = ops.constant(np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1), F32, CPU)
    return [
        x[1:, ::2],
        ops.concat([x, x[:1]], axis=0),
        ops.split(x, [2, 4], axis=1)[1],
        ops.permute(ops.reshape(x, [2, 2, 6]), [2, 0, 1]),
        ops.tile(x, [2, 1]),
        ops.pad(x, [1, 0, 0, 2], value=3.0),
        ops.range(0, 7, 2, dtype=I64, out_dim=4, device=CPU),
        ops.gather(x, index, axis=0),
        ops.gather_nd(x, ops.reshape(index, [2, 1])),
        ops.scatter(x, x[:1] * 5, ops.constant([[1, 0, 3, 2, 1, 0]], I64, CPU), axis=0),
        ops.scatter_nd(x, x[:2] * 7, ops.reshape(index, [2, 1])),
        ops.cumsum(x, axis=1),
        ops.cumsum(x, axis=1, exclusive=True, reverse=True),
        values,
        order,
        ops.argsort(ops.reshape(x, [24])),
        ops.band_part(x, num_lower=1, num_upper=0),
        ops.conv2d(wide, kernel, stride=(2, 1), padding=(1, 1, 0, 1)),
        ops.max_pool2d(wide, (2, 2), 2),
        ops.nonzero(ops.greater(x, 0.0), "count"),
        ops.cond(ops.greater(x[0, 0], 0.0), [x.type], lambda: x + 1, lambda: x - 1)[0],
        ops.while_loop(
            [x], lambda v: ops.greater(ops.constant(50.0, F32, CPU), v[0, 0]), lambda v: [v * 2]
        )[0],
    ]


def attention(cache, q, qkv, freqs, relative, offsets, kv, layer):
    """Rotation with store, then every mask over the same cache."""
    turned = kernels.rope_split_store_ragged(
        cache.params, qkv, offsets, freqs, kv, layer, HEADS, interleaved=False
    )

    def attend(mask, window=-1, **options):
        return kernels.flash_attention_ragged(
            cache.params, q, offsets, kv, layer, mask, 0.25, local_window_size=window, **options
        )

    return [
        turned,
        attend(Mask.CAUSAL_MASK),
        attend(Mask.NULL_MASK),
        attend(Mask.SLIDING_WINDOW_CAUSAL_MASK, 128),
        attend(Mask.CHUNKED_CAUSAL_MASK, 128),
        attend(Mask.CAUSAL_MASK, rel_logits=relative),
    ]


def rotations(x, offsets, start, freqs, narrow):
    """Whole heads in both layouts, part of a head in neighbouring pairs."""
    return [
        kernels.rope_ragged(x, offsets, start, freqs, interleaved=True),
        kernels.rope_ragged(x, offsets, start, freqs, interleaved=False),
        kernels.rope_ragged(x, offsets, start, narrow, interleaved=True),
        kernels.rope_ragged(x, offsets, start, narrow, interleaved=True, rope_first=True),
    ]


def recurrence(x, weight, bias, has_state, slots, starts, y, gate, norm, pool):
    """Convolution with a cached window, gated group norm."""
    starts = ops.cast(starts, DType.int32)
    conv = state_space.causal_conv1d_varlen_fwd(
        x, weight, bias, pool, starts, slots, has_state, channels_last=True
    )
    return [conv, state_space.gated_group_rmsnorm(y, gate, norm, 1e-5, 8)]


def scan(x, dt, a, b, c, d, dt_bias, has_state, slots, starts, pool):
    """Mamba-2."""
    starts = ops.cast(starts, DType.int32)
    return state_space.mamba2_ssd_chunk_scan_varlen_fwd_inplace(
        x, dt, a, b, c, d, dt_bias, pool, starts, has_state, slots
    )


def randoms(*shapes):
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Case:
    """A graph, its inputs (`more`: those of another step), and which are changed in place."""

    more = None

    def __init__(self, name, module, types, inputs, body):
        self.name, self.inputs = name, inputs
        self.buffers = [i for i, kind in enumerate(types) if isinstance(kind, BufferType)]
        with Graph(name, input_types=types, module=module) as graph:
            values = [
                value.buffer if isinstance(kind, BufferType) else value.tensor
                for value, kind in zip(graph.inputs, types, strict=True)
            ]
            result = body(*values)
            graph.output(*(result if isinstance(result, list | tuple) else [result]))
        self.graph = graph

    def evaluated(self):
        inputs = [x.copy() for x in self.inputs]
        outputs = Program(self.graph).run(inputs, {})
        return [*[x.numpy() for x in outputs], *[inputs[i] for i in self.buffers]]

    def compiled(self, model):
        inputs = [Buffer.from_numpy(x.copy()) for x in self.inputs]
        outputs = model.execute(*inputs)
        return [*[x.to_numpy() for x in outputs], *[inputs[i].to_numpy() for i in self.buffers]]


def typed(arrays, buffers=()):
    """Graph types of numpy inputs; those at `buffers` are mutable."""
    return [
        (BufferType if i in buffers else TensorType)(DType.from_numpy(x.dtype), list(x.shape), CPU)
        for i, x in enumerate(arrays)
    ]


def simple(name, module, arrays, body, buffers=()):
    arrays = [np.ascontiguousarray(x) for x in arrays]
    return Case(name, module, typed(arrays, buffers), arrays, body)


def attention_case(module, cache, counts, old):
    total = sum(counts)
    q, relative = randoms((total, HEADS, DIM), (total, HEADS, 256))
    (qkv,) = randoms((total, (HEADS + 2 * KV_HEADS) * DIM))
    angle = np.outer(np.arange(256), 50.0 ** (-np.arange(0, DIM, 2) / DIM))
    freqs = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(256, DIM).astype(np.float32)
    cache.lengths = list(old)
    cached = cache.values(counts)
    cached = [x.numpy() if isinstance(x, torch.Tensor) else x for x in cached]
    # Compiled kernels read page tables ahead, in multiples of 8 entries.
    cached[2] = np.pad(cached[2], ((0, 0), (0, 24 - cached[2].shape[1])))
    arrays = [q.numpy(), qkv.numpy(), freqs, relative.numpy(), offsets_of(counts), *cached]
    types = [f32("tokens", *x.shape[1:]) for x in arrays[:4]]
    types[2] = f32(*freqs.shape)
    types += [TensorType(DType.uint32, ["offsets"], CPU), *cache.types()]

    if module is None:  # a second step of the same graph
        return arrays

    def body(q, qkv, freqs, relative, offsets, *cached):
        kv = cache.params.unflatten_kv_inputs(iter(cached))[0]
        layer = ops.constant(1, DType.uint32, CPU)
        return attention(cache, q, qkv, freqs, relative, offsets, kv, layer)

    return Case("attention", module, types, arrays, body)


@pytest.fixture(scope="module")
def cases():
    module = Module()
    x, y, weight, bias = randoms((6, 16), (6, 16), (16,), (16,))
    found = [simple("elementwise", module, [v.numpy() for v in (x, y, weight, bias)], elementwise)]
    (x,) = randoms((4, 6))
    x[0, 0] = 0.7
    found.append(simple("movement", module, [x.numpy(), np.array([2, 0])], movement))
    found.append(attention_case(module, Cache(KV_HEADS, DIM, 3), COUNTS, [0, 0, 0]))
    found[-1].more = attention_case(None, Cache(KV_HEADS, DIM, 3), [1, 2, 1], COUNTS)
    x, freqs, narrow = randoms((5, 2, 16), (32, 16), (32, 8))
    offsets, start = np.array([0, 2, 5], np.uint32), np.array([6, 0], np.uint32)
    arrays = [x.numpy(), offsets, start, freqs.numpy(), narrow.numpy()]
    found.append(simple("rotations", module, arrays, rotations))
    slots, starts = np.array([2, 0], np.uint32), np.array([0, 3, 5], np.uint32)
    flags = np.array([True, False])
    x, weight, bias, y, gate, norm, pool = randoms(
        (5, 8), (8, 4), (8,), (5, 16), (5, 16), (16,), (3, 8, 3)
    )
    arrays = [x, weight, bias, flags, slots, starts, y, gate, norm, pool]
    arrays = [np.asarray(v) for v in arrays]
    found.append(simple("recurrence", module, arrays, recurrence, buffers=(9,)))
    tensors = randoms((5, 4, 8), (5, 4), (4,), (5, 2, 16), (5, 2, 16), (4,), (4,), (3, 4, 8, 16))
    tensors[2] = -tensors[2].abs()
    arrays = [*tensors[:7], flags, slots, starts, tensors[7]]
    arrays = [np.asarray(v) for v in arrays]
    found.append(simple("scan", module, arrays, scan, buffers=(10,)))
    session = InferenceSession(devices=[HOST()])
    models = session.init_all(session.compile(module))
    return {case.name: (case, models[case.name]) for case in found}


@pytest.mark.parametrize(
    "name",
    ["elementwise", "movement", "attention", "attention, later", "rotations", "recurrence", "scan"],
)
def test_evaluated_equals_compiled(name, cases):
    case, model = cases[name.partition(",")[0]]
    if "later" in name:
        case.inputs = case.more
    pairs = zip(case.evaluated(), case.compiled(model), strict=True)
    for number, (evaluated, compiled) in enumerate(pairs):
        # Both add in float32, in their own orders: what cancels keeps an error of what was added.
        size = max(1.0, float(np.abs(compiled).max(initial=0)))
        np.testing.assert_allclose(
            evaluated, compiled, rtol=2e-5, atol=5e-6 * size, err_msg=f"{name}, output {number}"
        )
