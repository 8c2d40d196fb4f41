"""A Python float becomes a bfloat16 constant by cutting bits off, not by rounding to nearest.

Expected: ops.constant(1.702, bfloat16) is 1.703125, the nearest bfloat16; torch gives that.
Observed (MAX 26.7.0): 1.6953125. Gemma 3's embedding scale and gpt-oss's 1.702 are such constants.
No compile is needed: the value is read back out of the graph.
"""

import sys

from max import _core
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef, Graph, ops

EXPECTED = {1.702: 1.703125, 96**0.5: 9.8125}


def constant(value):
    """The bfloat16 constant as the graph holds it, read as float32."""
    with Graph("constant", input_types=[]) as graph:
        graph.output(ops.constant(value, DType.bfloat16, DeviceRef.CPU()))
    for operation in graph._mlir_op.regions[0].blocks[0].operations:
        if operation.operation.name.endswith("constant"):
            attribute = _core.Attribute._from_cmlir(operation.operation.attributes["value"])
            buffer = _core.graph._buffer_from_constant_attr(attribute, DType.bfloat16, [1], CPU())
            bits = int(buffer.view(DType.uint16, [1]).to_numpy()[0])
            return _as_float(bits)
    raise RuntimeError("the graph has no constant")


def _as_float(bits):
    import struct

    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


observed = {value: constant(value) for value in EXPECTED}
print(f"expected {list(EXPECTED.values())}, observed {list(observed.values())}")
sys.exit(int(observed != EXPECTED))
