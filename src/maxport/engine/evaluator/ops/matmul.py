"""Matrix products."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, Unsupported, op
from maxport.engine.evaluator.formulas import product


@op("matmul", "batch_matmul")
def matmul(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product over the last axis of `a`; leading axes broadcast."""
    if call.attribute("packed_b", False):
        raise Unsupported("a packed right operand")
    return product(a, b.mT if call.attribute("transpose_b", False) else b, call.dtype())
