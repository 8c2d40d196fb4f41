"""A sum over an axis that broadcast_to made gives the value itself, not the value times its size.

Expected: the sum of ones of shape [2, 5], broadcast to [2, 8, 5], over the last axis is 5.
Observed (MAX 26.7.0, CPU): 1. Masked mean pooling divides by it, so BERT's and MPNet's embeddings
come out as sums instead of means.
"""

import sys

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

kind = TensorType(DType.float32, ["batch", "length"], DeviceRef.CPU())
with Graph("sum_of_broadcast", input_types=[kind]) as graph:
    mask = graph.inputs[0].tensor
    wide = ops.broadcast_to(ops.unsqueeze(mask, 1), ("batch", 8, "length"))
    graph.output(ops.sum(wide, axis=-1))

model = InferenceSession(devices=[CPU()]).load(graph)
observed = model.execute(np.ones((2, 5), np.float32))[0].to_numpy()
print(f"expected 5.0 everywhere, observed {np.unique(observed).tolist()}")
sys.exit(int(not np.allclose(observed, 5.0)))
