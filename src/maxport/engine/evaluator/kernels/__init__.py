"""Custom kernels, one file per family. Importing the package fills the table `call.KERNELS`."""

from maxport.engine.evaluator.kernels import (  # noqa: F401
    attention,
    cache,
    mla,
    moe,
    qk_norm,
    rope,
)
