"""Tiny twins: the same architecture as a checkpoint, at three small and pairwise distinct sizes.

Everything maxport traces and most of what it verifies is a twin, so that an 80-layer model costs
as much as a 2-layer one. Structure (layer kinds, which optional parts exist, GQA or MQA, tied or
not) is the real config's; every number is changed, so that a number in a traced graph can be tied
to the config key it came from.
"""

from maxport.twin.model import causal_lm_class, decoder_config, default_config, twin_model
from maxport.twin.save import save_twin
from maxport.twin.shrink import twin_config

__all__ = [
    "causal_lm_class",
    "decoder_config",
    "default_config",
    "save_twin",
    "twin_config",
    "twin_model",
]
