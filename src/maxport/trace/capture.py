"""Export a Hugging Face causal LM with attention and masks as opaque ops.

The model is traced with a static batch of a prime number of sequences that divides none of its
sizes, and a symbolic length, so that in every traced shape the batch axis, the token axis and all
other axes can be told apart.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from maxport.errors import MaxportError

LENGTH = 13
_PRIMES = (11, 17, 19, 23, 29, 31, 37, 41)
MASK_KINDS = ("bidirectional", "causal", "sliding", "chunked")
_PROBE = 40


@torch.library.custom_op("maxport::mask", mutates_args=())
def mask_op(
    kind: int, size: int, batch: int, queries: int, keys: int, dtype: torch.dtype
) -> Tensor:
    """A stand-in for an attention mask that hides nothing.

    `kind` indexes `MASK_KINDS`, `size` is its window or chunk; both are read off the trace.
    """
    return torch.zeros(batch, 1, queries, keys, dtype=dtype)


@mask_op.register_fake
def _(kind: int, size: int, batch: int, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(batch, 1, queries, keys, dtype=dtype)


@torch.library.custom_op("maxport::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    causal: bool,
) -> Tensor:
    """Scaled dot-product attention, opaque to the trace.

    Args:
        q: Queries (batch, heads, length, head_dim).
        k: Keys (batch, kv_heads, length, head_dim).
        v: Values (batch, kv_heads, length, v_dim).
        mask: None, the result of `maxport::mask`, or a real mask.
        sinks: One extra logit a head, (heads,), or None.
        scale: Factor on the scores.
        softcap: `c * tanh(score / c)` where not 0.
        window: Sliding window in tokens, 0 for none; ignored where `mask` is given.
        causal: Whether later keys are hidden; ignored where `mask` is given.

    Returns:
        (batch, length, heads, v_dim), as transformers' attention functions return it.
    """
    raise NotImplementedError("maxport::attention is only traced, never run")


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    causal: bool,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


_KNOWN = {"sliding_window", "softcap", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids"}


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls while a model is traced."""
    given = {k: v for k, v in kwargs.items() if v is not None and v is not False}
    unknown = sorted(k for k in given if k not in _KNOWN and isinstance(given[k], Tensor))
    if unknown:
        raise MaxportError(
            f"attention takes {', '.join(unknown)}, which has no lowering",
            where=type(module).__name__,
            fix="port this model by hand; maxport cannot express its attention",
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if query.shape[2] != key.shape[2]:
        is_causal = False
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = given.get("sliding_window") or 0
    out = torch.ops.maxport.attention(
        query,
        key,
        value,
        attention_mask,
        given.get("s_aux"),
        float(scale),
        float(given.get("softcap") or 0.0),
        int(window) if isinstance(window, int) else 0,
        bool(True if is_causal is None else is_causal),
    )
    return out, None


def classify_mask(visible: Tensor) -> tuple[str, int]:
    """Name the mask of a boolean (queries, keys) matrix, with its window or chunk size.

    Raises:
        MaxportError: The pattern is none of bidirectional, causal, sliding or chunked.
    """
    n = visible.shape[0]
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    causal = j <= i
    if bool(visible.all()):
        return "bidirectional", 0
    if torch.equal(visible, causal):
        return "causal", 0
    window = int(visible[-1].sum())
    if torch.equal(visible, causal & (i - j < window)):
        return "sliding", window
    for chunk in range(2, n):
        if torch.equal(visible, causal & (i // chunk == j // chunk)):
            return "chunked", chunk
    raise MaxportError(
        "the attention mask is neither causal, sliding, chunked nor bidirectional",
        fix="port this model by hand; maxport cannot express its mask",
    )


def _mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Any = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Tensor:
    """The mask function that transformers calls while a model is traced."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        i, j = torch.arange(_PROBE)[:, None], torch.arange(_PROBE)[None]
        zero = torch.zeros((), dtype=torch.int64)
        visible = mask_function(zero, zero, i, j)
        kind, size = classify_mask(torch.as_tensor(visible).expand(_PROBE, _PROBE).bool())
    index = MASK_KINDS.index(kind)
    out: Tensor = torch.ops.maxport.mask(index, size, batch_size, q_length, kv_length, dtype)
    return out


ALL_ATTENTION_FUNCTIONS.register("maxport", _attention_forward)
masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("maxport", _mask_forward)


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    seen: set[int] = set()
    stack = [getattr(m, "config", None) for m in model.modules()]
    while stack:
        config = stack.pop()
        if config is None or id(config) in seen or not hasattr(config, "to_dict"):
            continue
        seen.add(id(config))
        yield config
        stack += [getattr(config, name, None) for name in (config.sub_configs or {})]


@contextlib.contextmanager
def opaque_attention(model: PreTrainedModel) -> Iterator[None]:
    """Route the model's attention, masks and experts through maxport's ops while inside."""
    saved = []
    for config in _configs(model):
        saved.append(
            (config, config._attn_implementation_internal, config._experts_implementation_internal)
        )
        config._attn_implementation_internal = "maxport"
        config._experts_implementation_internal = "batched_mm"
    packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = packed
        for config, attention, experts in saved:
            config._attn_implementation_internal = attention
            config._experts_implementation_internal = experts


class _Logits(nn.Module):
    """The model as a function of token ids and positions to logits, without a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self.positions = "position_ids" in accepted
        self.cache = "use_cache" in accepted

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        kwargs: dict[str, Any] = {"position_ids": position_ids} if self.positions else {}
        if self.cache:
            kwargs["use_cache"] = False
        out = self.model(input_ids=input_ids, **kwargs)
        logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
        return logits


@contextlib.contextmanager
def unscaled_rope(model: PreTrainedModel) -> Iterator[None]:
    """Keep rotary frequencies as they are made: what transformers does at the trained lengths.

    `dynamic_rope_update` (modeling_rope_utils.py) swaps them once a sequence is longer, which no
    graph can hold; the emitter restores that from the configuration.
    """
    changed = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
            changed.append((module, kind))
            module.rope_type = "unscaled"
    try:
        yield
    finally:
        for module, kind in changed:
            module.rope_type = kind


@dataclass(frozen=True)
class Traced:
    """An exported program, the batch size it was exported with, and its buffers in full precision.

    A model made in bfloat16 rounds the tables it computes; `buffers` holds what a float32 one has.
    """

    program: ExportedProgram
    batch: int
    buffers: Mapping[str, Tensor]


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        for v in value.values():
            yield from _numbers(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _numbers(v)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _batch(model: PreTrainedModel) -> int:
    """A prime that divides no size of the model."""
    sizes = {s for p in [*model.parameters(), *model.buffers()] for s in p.shape}
    sizes |= set(_numbers(model.config.to_dict()))
    for prime in _PRIMES:
        if all(s % prime for s in sizes if s):
            return prime
    return next(p for p in range(43, 10**6, 2) if all(s % p for s in sizes if s))


def export_model(model: PreTrainedModel, exact: PreTrainedModel | None = None) -> Traced:
    """Export `model` (any dtype, eval mode) for a fixed batch of sequences of symbolic length.

    Args:
        model: The model to trace.
        exact: The same model in float32, for its buffers; `model` itself if None.

    Returns:
        The training-IR program, in-place ops functionalised; inputs `input_ids` and
        `position_ids`, both (batch, length) int64; output logits (batch, length, vocab).

    Raises:
        MaxportError: The model cannot be traced; carries torch's reason.
    """
    batch = _batch(model)
    ids = torch.zeros(batch, LENGTH, dtype=torch.int64) + torch.arange(3, 3 + LENGTH)
    pos = torch.arange(LENGTH).expand(batch, -1).contiguous()
    buffers = {f"model.{n}": b for n, b in (exact or model).named_buffers()}
    error: Exception | None = None
    wrapped = _Logits(model).eval()
    with torch.no_grad(), opaque_attention(model), unscaled_rope(model):
        for length in (Dim("s", min=2, max=4096), Dim.AUTO):
            try:
                shapes = {"input_ids": {1: length}, "position_ids": {1: length}}
                program = export(wrapped, (ids, pos), dynamic_shapes=shapes, strict=False)
                return Traced(program.run_decompositions({}), batch, buffers)
            except MaxportError:
                raise
            except Exception as e:  # torch raises many kinds here; the last one is reported
                error = error or e
    first = str(error).strip().split("\n", 1)[0][:300]
    raise MaxportError(
        f"{type(model).__name__} cannot be traced: {type(error).__name__}: {first}",
        fix="check that the model runs in transformers; if it does, port it by hand",
    )
