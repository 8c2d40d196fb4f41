"""Matrix products."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, Unsupported, op


@op("matmul", "batch_matmul")
def matmul(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product over the last axis of `a`; leading axes broadcast."""
    if call.attribute("packed_b", False):
        raise Unsupported("a packed right operand")
    return product(a, b.mT if call.attribute("transpose_b", False) else b, call.dtype())


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`a @ b` in `dtype`; mixed or 8-bit operands multiply in float32."""
    if a.dtype != b.dtype or a.dtype.itemsize == 1:
        return (a.float() @ b.float()).to(dtype)
    return (a @ b).to(dtype)
