"""Graph ops, one file per family. Importing the package fills the table `call.OPS`."""

from maxport.engine.evaluator.ops import (  # noqa: F401
    buffer,
    collective,
    composite,
    control,
    conv,
    elementwise,
    gather,
    matmul,
    norm,
    random,
    reduce,
    shape,
    sort,
)
