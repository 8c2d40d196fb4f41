"""Emitted functions for rotary position embedding: tables of every kind, and their use."""

from __future__ import annotations

from maxport.emit.helper import CPU, DTYPE, KERNELS, KV, MATH, NP, TENSOR, F, Helper

ROPE_HELPERS: dict[str, Helper] = {
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
        (TENSOR, KV, KERNELS.format("rope_ragged")),
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
        (F, TENSOR, KV),
        ("rotate",),
    ),
    "rotate_long": Helper(
        '''
def rotate_long(
    x: Tensor,
    freqs_cis: Tensor,
    kv: PagedCacheValues,
    row_offsets: Tensor,
    *,
    original: int,
    start: int,
    width: int,
    interleaved: bool,
) -> Tensor:
    """Rotary position embedding with LongRoPE of `width` columns of each head from `start` on.

    A request that is longer than the model was trained on takes the second half of the table for
    all its new tokens, as transformers does.

    Args:
        x: Queries or keys (total, heads, head_dim).
        freqs_cis: The table of `longrope_table`.
        kv: The paged KV cache, which knows how many tokens of each request came before.
        row_offsets: Where each request's tokens begin.
        original: Longest request that the model was trained on.
        start: First column that turns.
        width: Columns that turn.
        interleaved: Whether a pair is two adjacent columns; otherwise column i and i + half.
    """
    cached = as_tensor(kv.cache_lengths)
    new = F.rebind(row_offsets[1:] - row_offsets[:-1], cached.shape)
    long = F.cast(cached + new > original, cached.dtype)
    first = cached + long * (int(freqs_cis.shape[0]) // 2)
    rest = int(x.shape[-1]) - start - width
    sizes = [size for size in (start, width, rest) if size]
    parts = x.split(sizes, axis=-1) if len(sizes) > 1 else [x]
    turned = 1 if start else 0
    parts[turned] = rope_ragged(
        parts[turned], row_offsets, first, freqs_cis, interleaved=interleaved
    )
    return F.concat(parts, axis=-1) if len(parts) > 1 else parts[0]
''',
        (F, TENSOR, KV, KERNELS.format("rope_ragged")),
        ("as_tensor",),
    ),
    "longrope_table": Helper(
        '''
def longrope_table(
    short: np.ndarray, long: np.ndarray, positions: int, like: Tensor, *, factor: float = 1.0
) -> Tensor:
    """The rows of `rope_table` for short requests, then those for long ones."""
    tables = [rope_table(f, positions, like, factor=factor) for f in (short, long)]
    return F.concat(tables, axis=0)
''',
        (F, TENSOR, NP),
        ("rope_table",),
    ),
    "longrope_frequencies": Helper(
        '''
def longrope_frequencies(
    width: int, rope_theta: float, factors: Sequence[float]
) -> np.ndarray:
    """Rotary frequencies, each slowed down by a factor of its own."""
    return default_frequencies(width, rope_theta) / np.asarray(factors)
''',
        (NP, "from collections.abc import Sequence"),
        ("default_frequencies",),
    ),
    "longrope_factor": Helper(
        '''
def longrope_factor(longest: int, original: int) -> float:
    """LongRoPE's length of a rotated unit vector."""
    stretch = longest / original
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
''',
        (MATH,),
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
        (F, TENSOR, DTYPE, CPU, NP),
    ),
    "default_frequencies": Helper(
        '''
def default_frequencies(width: int, rope_theta: float) -> np.ndarray:
    """Rotary frequencies, one for each pair of `width` columns, in radians per position."""
    return 1.0 / rope_theta ** (np.arange(0, width, 2) / width)
''',
        (NP,),
    ),
    "linear_frequencies": Helper(
        '''
def linear_frequencies(width: int, rope_theta: float, factor: float) -> np.ndarray:
    """Rotary frequencies with positions compressed by `factor`."""
    return default_frequencies(width, rope_theta) / factor
''',
        (NP,),
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
        (NP, MATH),
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
        (NP, MATH),
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
        (NP,),
    ),
    "yarn_factor": Helper(
        '''
def yarn_factor(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's length of a rotated unit vector."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale_all_dim else scale(mscale)
''',
        (MATH,),
    ),
}
