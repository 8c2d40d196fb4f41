"""Custom kernels, one file per family. Importing the package fills the table `call.KERNELS`."""

from maxport.engine.evaluator.kernels import (  # noqa: F401
    attention,
    cache,
    compressed,
    float8,
    misc,
    mla,
    moe,
    projection,
    qk_norm,
    rope,
    state_space,
    uncached,
)
