"""The Hugging Face model that a port must equal: float32, eager attention, one sequence at a time.

The reference is checked before it is believed: every weight must come from the checkpoint and its
logits must be finite. Sequences never share a batch, so no padding can leak into a verdict.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maxport.errors import MaxportError
from maxport.quiet import quiet


class NoReference(MaxportError):
    """The reference cannot be built or believed, so nothing can be judged."""


@dataclass
class Reference:
    """A loaded reference model.

    Attributes:
        model: The transformers model, float32, in eval mode.
        config: Its text config.
        notes: What the self-check found that does not stop a verdict.
    """

    model: Any
    config: Any
    notes: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.config.vocab_size)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of all positions, float32 (len(tokens), vocab), in one forward without a cache."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], dtype=torch.int64)
            out = self.model(input_ids=ids, use_cache=False).logits[0]
        array: np.ndarray = out.float().numpy()
        return array

    def greedy(self, tokens: Sequence[int], steps: int) -> list[int]:
        """`tokens` continued by `steps` greedy tokens, through the reference's own cache."""
        import torch

        known = [int(token) for token in tokens]
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([known]), use_cache=True)
            for _ in range(steps):
                known.append(int(out.logits[0, -1].argmax()))
                out = self.model(
                    input_ids=torch.tensor([known[-1:]]),
                    past_key_values=out.past_key_values,
                    use_cache=True,
                )
        return known


def load_reference(folder: Path, *, trust_remote_code: bool = False) -> Reference:
    """Load the checkpoint in `folder` as transformers does, in float32, and check it.

    Raises:
        NoReference: transformers has no such class, weights are missing or of another shape, or
            the logits are not finite.
    """
    import torch
    import transformers

    from maxport.twin import causal_lm_class

    try:
        with quiet(), own_configs():
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
            model, info = causal_lm_class(config).from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        raise NoReference(
            f"transformers does not load the reference: {type(error).__name__}: {text}",
            where=str(folder),
        ) from error
    notes = _loading_notes(info, folder)
    model.eval()
    config = model.config.get_text_config()
    reference = Reference(model, config, notes)
    _check_finite(reference, folder)
    return reference


def _loading_notes(info: dict[str, Any], folder: Path) -> list[str]:
    """Notes on tensors the reference leaves unread; missing or misshapen ones are an error."""
    for key in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info.get(key) or [])
        if names:
            kind = key.removesuffix("_keys")
            raise NoReference(
                f"the reference has {len(names)} {kind} weights: {', '.join(names[:4])}",
                where=str(folder),
                fix="complete the checkpoint; random weights cannot be a reference",
            )
    unread = sorted(str(name) for name in info.get("unexpected_keys") or [])
    if not unread:
        return []
    first = ", ".join(unread[:4])
    return [f"transformers leaves {len(unread)} tensors of the checkpoint unread: {first}"]


def _check_finite(reference: Reference, folder: Path) -> None:
    vocab = reference.vocab_size
    logits = reference.logits([index % vocab for index in range(1, 9)])
    if not np.isfinite(logits).all():
        raise NoReference("the reference's logits are not finite", where=str(folder))
    if float(logits.max() - logits.min()) < 1e-4:
        raise NoReference("the reference's logits are constant", where=str(folder))


def versions() -> dict[str, str]:
    """Versions of everything that a verdict depends on."""
    found = {}
    for package in ("maxport", "max", "transformers", "torch", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@contextlib.contextmanager
def own_configs() -> Iterator[None]:
    """Config classes of transformers, not those that MAX puts in their place when imported."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    extra = CONFIG_MAPPING._extra_content
    hidden = {kind: extra.pop(kind) for kind in list(extra) if kind in CONFIG_MAPPING._mapping}
    try:
        yield
    finally:
        extra.update(hidden)
