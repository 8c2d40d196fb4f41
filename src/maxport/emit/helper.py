"""What an emitted function is, and the imports that many of them need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Helper:
    """One emitted function: its source, its imports, and the helpers it calls."""

    source: str
    imports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


F = "from max.experimental import functional as F"
TENSOR = "from max.experimental.tensor import Tensor"
CPU = "from max.driver import CPU"
DTYPE = "from max.dtype import DType"
NP = "import numpy as np"
MATH = "import math"
KERNELS = "from max.experimental.nn.common_layers.functional_kernels import {}"
KV = "from max.nn.kv_cache import KVCacheParams, PagedCacheValues"
MASK = "from max.nn.attention import MHAMaskVariant"
