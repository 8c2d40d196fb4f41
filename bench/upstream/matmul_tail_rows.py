"""On sm_90 (H100, H200), bfloat16 products write zeros past their last row, over other values.

Needs such a GPU. Exit code 1 while the fault is there, 2 without a GPU.
"""

import os
import sys

import torch
from max.driver import CPU, Accelerator, Buffer, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

#: Output and input width of each product; all take the same rows.
WIDTHS = ((512, 256), (256, 256), (1024, 256))
ROWS = (1, 2, 16, 64, 100, 128, 192, 256, 320, 512)
RUNS = 5


def build() -> Graph:
    """Three products of one input, each an output of its own."""
    gpu = DeviceRef.GPU()
    types = [TensorType(DType.bfloat16, ["rows", 256], gpu)]
    types += [TensorType(DType.bfloat16, list(shape), gpu) for shape in WIDTHS]
    with Graph("products", input_types=types) as graph:
        x, *weights = (value.tensor for value in graph.inputs)
        graph.output(*(x @ ops.transpose(w, 0, 1) for w in weights))
    return graph


def main() -> int:
    """Compare with torch for several numbers of rows, in several executions each."""
    if not accelerator_count():
        print("no GPU")
        return 2
    device = Accelerator()
    model = InferenceSession(devices=[device]).load(build())
    torch.manual_seed(0)
    weights = [torch.randn(shape).mul(shape[1] ** -0.5).bfloat16() for shape in WIDTHS]
    faults = 0
    for rows in ROWS:
        x = torch.randn(rows, 256).bfloat16()
        inputs = [Buffer.from_dlpack(value).to(device) for value in (x, *weights)]
        shares = [0.0] * len(weights)
        for _ in range(RUNS):
            found = [torch.from_dlpack(v.to(CPU())).float() for v in model.execute(*inputs)]
            for i, (value, weight) in enumerate(zip(found, weights, strict=True)):
                wrong = (value - x.float() @ weight.float().T).abs() > 0.1
                shares[i] = max(shares[i], float(wrong.float().mean()))
        faults += any(shares)
        listed = ", ".join(f"{share:.0%}" for share in shares)
        print(f"{rows:4} rows: expected 0% wrong in each product, observed {listed}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
