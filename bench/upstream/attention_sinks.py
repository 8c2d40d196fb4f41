"""Attention with sinks is wrong as soon as a query sees more than 128 keys.

Expected: flash_attention_ragged with sink_weights equals softmax over the scores and the sink's
logit, at every length.
Observed (MAX 26.7.0, CPU): right up to 128 keys (1e-6), wrong from 129 on (0.4 and more).
"""

import sys

import numpy as np
from max import tree
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.nn import kernels
from max.nn.attention import MHAMaskVariant
from max.nn.kv_cache import MHAKVCacheParams

cpu, f32, page, dim = DeviceRef.CPU(), DType.float32, 128, 32
params = MHAKVCacheParams(
    dtype=f32, n_kv_heads=1, head_dim=dim, num_layers=1, devices=[cpu], page_size=page
)
heads = TensorType(f32, ["n", 1, dim], cpu)
types = [heads, heads, heads, TensorType(DType.uint32, ["offsets"], cpu), TensorType(f32, [1], cpu)]
with Graph("sinks", input_types=[*types, *tree.leaves(params.get_symbolic_inputs())]) as graph:
    q, k, v, offsets, sink = (value.tensor for value in graph.inputs[:5])
    kv = params.unflatten_kv_inputs(iter(graph.inputs[5:]))[0]
    layer = ops.constant(0, DType.uint32, cpu)
    kernels.store_k_cache_ragged(kv, k, offsets, layer)
    kernels.store_v_cache_ragged(kv, v, offsets, layer)
    graph.output(
        kernels.flash_attention_ragged(
            params, q, offsets, kv, layer, MHAMaskVariant.CAUSAL_MASK, 0.2, sink_weights=sink
        )
    )
model = InferenceSession(devices=[CPU()]).load(graph)


def error(length):
    """Largest difference from the formula for a prompt of `length` tokens."""
    rng = np.random.default_rng(length)
    q, k, v = rng.normal(size=(3, length, 1, dim)).astype(np.float32)
    sink = np.array([0.5], np.float32)
    blocks = np.zeros((4, *params.shape_per_block), np.float32)
    cache = [
        blocks,
        np.array([0], np.uint32),
        np.pad(np.array([[1, 2]], np.uint32), ((0, 0), (0, 22))),
        np.array([length], np.uint32),
        np.array([length], np.uint32),
        np.array([blocks[0].size], np.int64),
        np.array([1, length, 1, length], np.int64),
    ]
    inputs = [q, k, v, np.array([0, length], np.uint32), sink, *cache]
    observed = model.execute(*map(Buffer.from_numpy, inputs))[0].to_numpy()[:, 0]
    scores = np.where(np.tri(length, dtype=bool), q[:, 0] @ k[:, 0].T * 0.2, -np.inf)
    weights = np.exp(np.concatenate([scores, np.full((length, 1), 0.5)], 1))
    weights /= weights.sum(1, keepdims=True)
    return float(np.abs(observed - weights[:, :-1] @ v[:, 0]).max())


errors = {length: error(length) for length in (64, 128, 129, 200)}
print(f"expected below 1e-5 at every length, observed {errors}")
sys.exit(int(max(errors.values()) > 1e-4))
