"""Does a candidate twin build and run, and which parameters has it?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from maxport.twin.model import twin_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROBE_LENGTH = 11


def structure(config: PreTrainedConfig) -> tuple[tuple[str, int], ...]:
    """Build the twin, run one forward, and return its parameters' names and ranks.

    Numbers in names (layers, experts) are replaced by `#`, so that a different number of experts
    is the same structure.

    Raises:
        ValueError: If logits are not finite or all alike.
        Exception: Whatever the model class raises on building or running.
    """
    import torch

    model = twin_model(config)
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (1, PROBE_LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            logits = model(input_ids=ids).logits
        except (ValueError, AttributeError):  # a cache that does not fit the kept layers' kinds
            logits = model(input_ids=ids, use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("logits are not finite")
    if float(logits.float().std()) < 1e-3:
        raise ValueError("logits are all alike")
    names = {(re.sub(r"\d+", "#", n), p.ndim) for n, p in model.named_parameters()}
    return tuple(sorted(names))
