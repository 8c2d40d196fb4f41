"""Largest and smallest k, argsort."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maxport.engine.evaluator.call import Call, op


@op("top_k", "bottom_k")
def top_k(call: Call, x: torch.Tensor, *rest: torch.Tensor) -> Sequence[torch.Tensor]:
    """The k largest (smallest) along an axis, sorted; equal values keep their order."""
    k = int(rest[0].item()) if rest else int(call.attribute("k"))
    axis = int(rest[1].item()) if len(rest) > 1 else int(call.attribute("axis", -1))
    values, index = torch.sort(x, dim=axis, descending=call.node.kind == "top_k", stable=True)
    return [values.narrow(axis, 0, k), index.narrow(axis, 0, k)]
