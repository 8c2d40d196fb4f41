"""Where a model lives: a folder, a Hub id or a GGUF file, opened without loading a tensor.

Nothing here imports `max`, and only the GGUF converter imports torch and transformers, inside the
call that converts.
"""

from maxport.checkpoint.cache import cache_root
from maxport.checkpoint.gguf import convert_gguf
from maxport.checkpoint.headers import DTYPE_BITS, TensorHeader
from maxport.checkpoint.known import known_architectures, known_model_types
from maxport.checkpoint.opening import Checkpoint, open_checkpoint

__all__ = [
    "DTYPE_BITS",
    "Checkpoint",
    "TensorHeader",
    "cache_root",
    "convert_gguf",
    "known_architectures",
    "known_model_types",
    "open_checkpoint",
]
