"""Functions that ports share, emitted into `functional.py` only where the graph calls them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Helper:
    """One emitted function: its source, its imports, and the helpers it calls."""

    source: str
    imports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


_F = "from max.experimental import functional as F"
_TENSOR = "from max.experimental.tensor import Tensor"
_CPU = "from max.driver import CPU"
_DTYPE = "from max.dtype import DType"
_NP = "import numpy as np"
_MATH = "import math"
_KERNELS = "from max.experimental.nn.common_layers.functional_kernels import {}"
_KV = "from max.nn.kv_cache import KVCacheParams, PagedCacheValues"
_MASK = "from max.nn.attention import MHAMaskVariant"

HELPERS: dict[str, Helper] = {
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
        (_F, _TENSOR, _DTYPE),
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
            _F,
            _TENSOR,
            _CPU,
            _DTYPE,
            _KV,
            _KERNELS.format("store_k_cache_ragged"),
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
        (_TENSOR, _KV, _MASK, _KERNELS.format("flash_attention_ragged")),
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
        (_F, _TENSOR, _KV, _MASK),
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
            _F,
            _TENSOR,
            _DTYPE,
            _KV,
            _NP,
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
        (_TENSOR, "from typing import Any"),
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
        (_F, _TENSOR, _DTYPE, _KV, "from max.graph import DimLike"),
        ("as_tensor",),
    ),
    "rotate": Helper(
        '''
def rotate(
    x: Tensor,
    freqs_cis: Tensor,
    kv: PagedCacheValues,
    row_offsets: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """Rotary position embedding of heads (total, heads, head_dim).

    Args:
        x: Queries or keys.
        freqs_cis: Cosine and sine of every position and pair, (positions, head_dim).
        kv: The paged KV cache, which knows how many tokens of each request came before.
        row_offsets: Where each request's tokens begin.
        interleaved: Whether a pair is two adjacent columns; otherwise column i and i + half.
    """
    return rope_ragged(
        x, row_offsets, as_tensor(kv.cache_lengths), freqs_cis, interleaved=interleaved
    )
''',
        (_TENSOR, _KV, _KERNELS.format("rope_ragged")),
        ("as_tensor",),
    ),
    "rotate_columns": Helper(
        '''
def rotate_columns(
    x: Tensor,
    freqs_cis: Tensor,
    kv: PagedCacheValues,
    row_offsets: Tensor,
    *,
    start: int,
    width: int,
    interleaved: bool,
) -> Tensor:
    """Rotary position embedding of `width` columns of each head, from column `start` on."""
    rest = int(x.shape[-1]) - start - width
    sizes = [size for size in (start, width, rest) if size]
    parts = x.split(sizes, axis=-1) if len(sizes) > 1 else [x]
    turned = 1 if start else 0
    parts[turned] = rotate(parts[turned], freqs_cis, kv, row_offsets, interleaved=interleaved)
    return F.concat(parts, axis=-1) if len(parts) > 1 else parts[0]
''',
        (_F, _TENSOR, _KV),
        ("rotate",),
    ),
    "rope_table": Helper(
        '''
def rope_table(
    frequencies: np.ndarray, positions: int, like: Tensor, *, factor: float = 1.0
) -> Tensor:
    """Cosines and sines for rotary embedding, adjacent: (positions, 2 * pairs).

    Args:
        frequencies: Angle per position of every pair, in radians.
        positions: Positions to cover.
        like: A tensor with the table's dtype and device.
        factor: Length of a rotated unit vector.
    """
    position = F.arange(0, positions, 1, dtype=DType.float32, device=CPU())
    frequency = F.constant(frequencies.astype(np.float32), DType.float32, device=CPU())
    angle = F.outer(position, frequency)
    table = F.stack([F.cos(angle) * factor, F.sin(angle) * factor], axis=-1)
    table = F.reshape(table, (positions, 2 * len(frequencies)))
    return F.cast(table, like.dtype).to(like.device)
''',
        (_F, _TENSOR, _DTYPE, _CPU, _NP),
    ),
    "default_frequencies": Helper(
        '''
def default_frequencies(width: int, rope_theta: float) -> np.ndarray:
    """Rotary frequencies, one for each pair of `width` columns, in radians per position."""
    return 1.0 / rope_theta ** (np.arange(0, width, 2) / width)
''',
        (_NP,),
    ),
    "linear_frequencies": Helper(
        '''
def linear_frequencies(width: int, rope_theta: float, factor: float) -> np.ndarray:
    """Rotary frequencies with positions compressed by `factor`."""
    return default_frequencies(width, rope_theta) / factor
''',
        (_NP,),
        ("default_frequencies",),
    ),
    "llama3_frequencies": Helper(
        '''
def llama3_frequencies(
    width: int,
    rope_theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    """Rotary frequencies with Llama 3.1's scaling: long waves slowed down, short ones kept."""
    base = default_frequencies(width, rope_theta)
    wavelength = 2 * math.pi / base
    turns = original_max_position_embeddings / wavelength
    smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * base / factor + smooth * base
''',
        (_NP, _MATH),
        ("default_frequencies",),
    ),
    "yarn_frequencies": Helper(
        '''
def yarn_frequencies(
    width: int,
    rope_theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_position_embeddings: int,
    truncate: bool,
) -> np.ndarray:
    """Rotary frequencies with YaRN's scaling: a ramp from kept to slowed-down frequencies."""
    base = default_frequencies(width, rope_theta)

    def pair_with(turns: float) -> float:
        reach = original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(reach) / (2 * math.log(rope_theta))

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)
    return base / factor * ramp + base * (1 - ramp)
''',
        (_NP, _MATH),
        ("default_frequencies",),
    ),
    "proportional_frequencies": Helper(
        '''
def proportional_frequencies(
    width: int, rope_theta: float, partial_rotary_factor: float, factor: float = 1.0
) -> np.ndarray:
    """Rotary frequencies of which only the first share of the pairs turn; the others are 0."""
    turning = int(partial_rotary_factor * width // 2)
    base = 1.0 / rope_theta ** (np.arange(0, 2 * turning, 2) / width)
    return np.concatenate([base, np.zeros(width // 2 - turning)]) / factor
''',
        (_NP,),
    ),
    "yarn_factor": Helper(
        '''
def yarn_factor(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's length of a rotated unit vector."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale_all_dim else scale(mscale)
''',
        (_MATH,),
    ),
    "alibi_slopes": Helper(
        '''
def alibi_slopes(heads: int, bias_max: float) -> list[float]:
    """ALiBi's slopes, one per head: a geometric sequence, interleaved for odd head counts."""
    whole = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-(i + 1) * bias_max / whole) for i in range(whole)]
    return slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads]
''',
        (_MATH,),
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
        (_F, _TENSOR, _DTYPE, _NP),
    ),
    "softcap": Helper(
        '''
def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`: values bent into (-cap, cap)."""
    return F.tanh(x / cap) * cap
''',
        (_F, _TENSOR),
    ),
    "squared_relu": Helper(
        '''
def squared_relu(x: Tensor) -> Tensor:
    """`max(x, 0) ** 2`."""
    positive = F.relu(x)
    return positive * positive
''',
        (_F, _TENSOR),
    ),
    "unit_rms_norm": Helper(
        '''
def unit_rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis without a weight."""
    ones = F.broadcast_to(F.constant(1.0, x.dtype, device=x.device), (x.shape[-1],))
    return rms_norm(x, ones, eps, multiply_before_cast=True)
''',
        (_F, _TENSOR, "from max.experimental.nn.norm import rms_norm"),
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
