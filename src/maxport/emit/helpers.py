"""Functions that ports share, emitted into `functional.py` only where the graph calls them."""

from __future__ import annotations

from collections.abc import Iterable

from maxport.emit.helper import CPU, DTYPE, KERNELS, KV, MASK, MATH, NP, TENSOR, F, Helper
from maxport.emit.helpers_rope import ROPE_HELPERS

HELPERS: dict[str, Helper] = {
    **ROPE_HELPERS,
    "last_n_rows": Helper(
        '''
def last_n_rows(row_offsets: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the last `n[0]` tokens of every request, and where each request's rows begin."""
    device = row_offsets.device
    back = F.range(n[0], 0, -1, out_dim="last_n", dtype=DType.int64, device=device)
    rows = F.reshape(F.unsqueeze(row_offsets[1:], -1) - back, shape=(-1,))
    starts = F.range(
        0, rows.shape[0] + n[0], n[0], out_dim="logit_offsets", dtype=DType.int64, device=device
    )
    return rows, starts
''',
        (F, TENSOR, DTYPE),
    ),
    "store": Helper(
        '''
def store(
    k: Tensor, v: Tensor, kv: PagedCacheValues, row_offsets: Tensor, layer: int
) -> TensorValue:
    """Write a layer's new keys and values into the paged cache; return the layer's index."""
    index = F.constant(layer, DType.uint32, device=CPU())
    store_k_cache_ragged(kv, k, row_offsets, index)
    store_v_cache_ragged(kv, v, row_offsets, index)
    return index
'''.replace("TensorValue", "Tensor"),
        (
            F,
            TENSOR,
            CPU,
            DTYPE,
            KV,
            KERNELS.format("store_k_cache_ragged"),
            "from max.nn.kernels import store_v_cache_ragged as _store_v_cache_ragged",
            "@store_v_cache_ragged = F.functional(_store_v_cache_ragged)",
        ),
    ),
    "attend": Helper(
        '''
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedCacheValues,
    row_offsets: Tensor,
    kv_params: KVCacheParams,
    layer: int,
    *,
    scale: float,
    mask: MHAMaskVariant = MHAMaskVariant.CAUSAL_MASK,
    window: int = -1,
) -> Tensor:
    """Attention of new tokens to everything cached for their request.

    Args:
        q: Queries (total, heads, head_dim).
        k: Keys (total, kv_heads, head_dim), written to the cache first.
        v: Values (total, kv_heads, head_dim), written to the cache first.
        kv: The paged KV cache.
        row_offsets: Where each request's tokens begin, (requests + 1,) uint32.
        kv_params: Layout of the cache.
        layer: Which layer of the cache.
        scale: Factor on the scores.
        mask: Which cached tokens a token sees.
        window: Tokens that a sliding or chunked mask spans.

    Returns:
        (total, heads, head_dim).
    """
    index = store(k, v, kv, row_offsets, layer)
    return flash_attention_ragged(
        kv_params,
        input=q,
        kv_collection=kv,
        layer_idx=index,
        input_row_offsets=row_offsets,
        mask_variant=mask,
        scale=scale,
        local_window_size=window,
    )
''',
        (TENSOR, KV, MASK, KERNELS.format("flash_attention_ragged")),
        ("store",),
    ),
    "attend_padded": Helper(
        '''
def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedCacheValues,
    row_offsets: Tensor,
    kv_params: KVCacheParams,
    layer: int,
    *,
    scale: float,
    mask: MHAMaskVariant = MHAMaskVariant.CAUSAL_MASK,
    window: int = -1,
) -> Tensor:
    """`attend` where layers differ in the width of their heads and share one cache.

    Zeros fill narrower heads up to the cache's width; they change neither scores nor results.
    """
    width = int(q.shape[-1])
    rest = kv_params.head_dim - width
    if rest:
        q, k, v = (F.pad(x, [0, 0, 0, 0, 0, rest]) for x in (q, k, v))
    out = attend(
        q, k, v, kv, row_offsets, kv_params, layer, scale=scale, mask=mask, window=window
    )
    return out[..., :width] if rest else out
''',
        (F, TENSOR, KV, MASK),
        ("attend",),
    ),
    "attend_scores": Helper(
        '''
def attend_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedCacheValues,
    row_offsets: Tensor,
    kv_params: KVCacheParams,
    layer: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    slopes: Sequence[float] = (),
) -> Tensor:
    """Attention with the scores written out, for what MAX's kernel cannot do.

    Gathers each request's keys and values from the paged cache, so it costs memory in proportion to
    new tokens times cached tokens.

    Args:
        q: Queries (total, heads, head_dim).
        k: Keys (total, kv_heads, head_dim), written to the cache first.
        v: Values (total, kv_heads, head_dim), written to the cache first.
        kv: The paged KV cache.
        row_offsets: Where each request's tokens begin, (requests + 1,) uint32.
        kv_params: Layout of the cache.
        layer: Which layer of the cache.
        scale: Factor on the scores.
        window: Tokens a token sees, itself included; 0 for all.
        softcap: `c * tanh(score / c)` where not 0.
        slopes: ALiBi slopes, one per head; empty for none.

    Returns:
        (total, heads, head_dim).
    """
    store(k, v, kv, row_offsets, layer)
    total, heads, head_dim = q.shape
    kv_heads, page = kv_params.n_kv_heads, kv_params.page_size
    groups = int(heads) // kv_heads
    request, positions = request_and_positions(row_offsets, kv, total)
    pages = F.cast(as_tensor(kv.lookup_table), DType.int64)
    blocks = Tensor.from_graph_value(ops.buffer_load(kv.kv_blocks))

    def cached(which: int) -> Tensor:
        """(total, cached tokens, kv_heads, head_dim) of each token's own request."""
        rows = F.gather(blocks[:, which, layer], pages, axis=0)
        flat = F.reshape(rows, (rows.shape[0], rows.shape[1] * page, kv_heads, head_dim))
        return F.gather(flat, request, axis=0)

    keys, values = cached(0), cached(1)
    length = keys.shape[1]
    grouped = F.reshape(q, (total, kv_heads, groups, head_dim))
    scores = F.matmul(grouped, F.permute(keys, (0, 2, 3, 1))) * scale
    if softcap:
        scores = F.tanh(scores / softcap) * softcap
    key_positions = F.arange(0, length, 1, out_dim=length, dtype=DType.int64, device=q.device)
    distance = F.unsqueeze(positions, 1) - F.unsqueeze(key_positions, 0)
    if len(slopes):
        steps = F.constant(
            np.asarray(slopes, np.float32).reshape(1, kv_heads, groups, 1), DType.float32, q.device
        )
        steps = steps * F.cast(F.reshape(distance, (total, 1, 1, length)), DType.float32)
        scores = scores - F.cast(steps, scores.dtype)
    seen = distance >= 0
    if window:
        seen = F.logical_and(seen, F.constant(window, DType.int64, q.device) > distance)
    hidden = F.constant(-1e30, DType.float32, q.device)
    masked = F.where(
        F.reshape(seen, (total, 1, 1, length)), F.cast(scores, DType.float32), hidden
    )
    weights = F.cast(F.softmax(masked), values.dtype)
    out = F.matmul(weights, F.permute(values, (0, 2, 1, 3)))
    return F.reshape(out, (total, heads, head_dim))
''',
        (
            F,
            TENSOR,
            DTYPE,
            KV,
            NP,
            "from collections.abc import Sequence",
            "from max.graph import ops",
        ),
        ("store", "request_and_positions", "as_tensor"),
    ),
    "as_tensor": Helper(
        '''
def as_tensor(value: Any) -> Tensor:
    """A graph value of the cache as a tensor."""
    return value if isinstance(value, Tensor) else Tensor.from_graph_value(value)
''',
        (TENSOR, "from typing import Any"),
    ),
    "request_and_positions": Helper(
        '''
def request_and_positions(
    row_offsets: Tensor, kv: PagedCacheValues, total: DimLike
) -> tuple[Tensor, Tensor]:
    """For every token, the index of its request and its position there, both (total,) int64."""
    device = row_offsets.device
    offsets = F.cast(row_offsets, DType.int64)
    row = F.arange(0, total, 1, out_dim=total, dtype=DType.int64, device=device)
    ended = F.unsqueeze(row, 1) >= F.unsqueeze(offsets[1:], 0)
    request = F.reshape(F.sum(F.cast(ended, DType.int64), axis=1), (total,))
    cached = F.cast(as_tensor(kv.cache_lengths), DType.int64)
    start = F.gather(cached, request, axis=0) - F.gather(offsets, request, axis=0)
    return request, row + start
''',
        (F, TENSOR, DTYPE, KV, "from max.graph import DimLike"),
        ("as_tensor",),
    ),
    "alibi_slopes": Helper(
        '''
def alibi_slopes(heads: int, bias_max: float) -> list[float]:
    """ALiBi's slopes, one per head: a geometric sequence, interleaved for odd head counts."""
    whole = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-(i + 1) * bias_max / whole) for i in range(whole)]
    return slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads]
''',
        (MATH,),
    ),
    "sinusoids": Helper(
        '''
def sinusoids(
    positions: Tensor, width: int, *, steps: int, dtype: DType, zero_row: int | None = None
) -> Tensor:
    """Sines, then cosines of positions (total,), as position embeddings (total, width).

    Args:
        positions: Position of every token.
        width: Columns of the result.
        steps: The frequencies are 10000 ** (-i / steps).
        dtype: Dtype of the result.
        zero_row: Position whose embedding is zero, as that of a padding token.
    """
    frequency = 10000.0 ** (-np.arange(width // 2) / steps)
    step = F.constant(frequency.astype(np.float32), DType.float32, device=positions.device)
    angle = F.unsqueeze(F.cast(positions, DType.float32), 1) * step
    rows = F.concat([F.sin(angle), F.cos(angle)], axis=-1)
    if zero_row is not None:
        rows = rows * F.cast(F.unsqueeze(positions, 1) != zero_row, DType.float32)
    return F.cast(rows, dtype)
''',
        (F, TENSOR, DTYPE, NP),
    ),
    "softcap": Helper(
        '''
def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`: values bent into (-cap, cap)."""
    return F.tanh(x / cap) * cap
''',
        (F, TENSOR),
    ),
    "squared_relu": Helper(
        '''
def squared_relu(x: Tensor) -> Tensor:
    """`max(x, 0) ** 2`."""
    positive = F.relu(x)
    return positive * positive
''',
        (F, TENSOR),
    ),
    "unit_rms_norm": Helper(
        '''
def unit_rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis without a weight."""
    ones = F.broadcast_to(F.constant(1.0, x.dtype, device=x.device), (x.shape[-1],))
    return rms_norm(x, ones, eps, multiply_before_cast=True)
''',
        (F, TENSOR, "from max.experimental.nn.norm import rms_norm"),
    ),
}


def closure(names: Iterable[str]) -> list[str]:
    """The helpers that `names` need, each after those it calls."""
    ordered: list[str] = []

    def add(name: str) -> None:
        for needed in HELPERS[name].needs:
            add(needed)
        if name not in ordered:
            ordered.append(name)

    for name in sorted(names):
        add(name)
    return ordered


def render_functional(names: Iterable[str]) -> str:
    """Source of `functional.py` with the named helpers and what they need, not yet formatted."""
    chosen = closure(names)
    lines = {line for name in chosen for line in HELPERS[name].imports}
    imports = sorted(line for line in lines if not line.startswith("@"))
    module_level = sorted(line[1:] for line in lines if line.startswith("@"))
    parts = [
        '"""Operations on ragged batches that the graph uses."""',
        "from __future__ import annotations",
        "\n".join(imports),
        "\n".join(module_level),
        *(HELPERS[name].source.strip("\n") for name in chosen),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
