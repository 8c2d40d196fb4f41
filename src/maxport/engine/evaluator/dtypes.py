"""MAX dtypes and the torch dtypes that carry them.

Unsigned 16, 32 and 64 bit integers are carried as int64, because torch has next to no arithmetic on
them; graphs use them for offsets and indices, which are far from wrapping round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from max.dtype import DType

CARRIER: dict[DType, torch.dtype] = {
    DType.bool: torch.bool,
    DType.int8: torch.int8,
    DType.int16: torch.int16,
    DType.int32: torch.int32,
    DType.int64: torch.int64,
    DType.uint8: torch.uint8,
    DType.uint16: torch.int64,
    DType.uint32: torch.int64,
    DType.uint64: torch.int64,
    DType.float16: torch.float16,
    DType.bfloat16: torch.bfloat16,
    DType.float32: torch.float32,
    DType.float64: torch.float64,
    DType.float8_e4m3fn: torch.float8_e4m3fn,
    DType.float8_e5m2: torch.float8_e5m2,
    DType.float8_e8m0fnu: torch.float8_e8m0fnu,
    DType.float4_e2m1fn: torch.uint8,
}

_UNSIGNED = {torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64}
_UNSIGNED_NUMPY = (np.dtype("uint16"), np.dtype("uint32"), np.dtype("uint64"))


HALF = (torch.float16, torch.bfloat16)
EIGHTH = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def carrier(dtype: DType, *, widen: tuple[torch.dtype, ...] = ()) -> torch.dtype:
    """The torch dtype that carries MAX's `dtype`; float32 where that is one of `widen`.

    Raises:
        KeyError: MAX's dtype has no counterpart in torch.
    """
    found = CARRIER[dtype]
    return torch.float32 if found in widen else found


def to_torch(value: Any) -> torch.Tensor:
    """A torch tensor over `value` without a copy (unsigned integers are widened, which copies).

    Args:
        value: A torch tensor, numpy array or scalar, driver `Buffer`, or MAX `WeightData`.
    """
    if not isinstance(value, torch.Tensor):
        data = getattr(value, "data", None)
        if hasattr(data, "__dlpack__"):  # WeightData wraps its buffer
            value = data
        if isinstance(value, np.ndarray | np.generic):
            value = np.asarray(value)
            if value.dtype in _UNSIGNED_NUMPY:
                value = value.astype(np.int64)
            value = torch.from_numpy(value)
        else:
            value = _from_dlpack(value)
    wide = _UNSIGNED.get(value.dtype)
    return value if wide is None else value.to(wide)


def _from_dlpack(value: Any) -> torch.Tensor:
    """A view of a driver buffer; types that dlpack does not carry go through their bytes."""
    dtype = getattr(value, "dtype", None)
    shape = tuple(int(size) for size in value.shape)
    exotic = isinstance(dtype, DType) and (dtype.is_float8() or dtype == DType.bool)
    if exotic and isinstance(dtype, DType) and len(shape):
        return torch.from_dlpack(value.view(DType.uint8)).view(carrier(dtype)).reshape(shape)
    return torch.from_dlpack(value)
