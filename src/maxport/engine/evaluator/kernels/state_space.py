"""Recurrent layers: causal convolutions with a cached window, Mamba-2 scans, gated delta rule.

States live in pools with one slot per sequence (and layer); kernels read and write them in place.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from maxport.engine.evaluator.call import Call, kernel


def windowed(
    x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution of one sequence that continues `history`.

    Args:
        x: [tokens, channels].
        weight: [channels, width]; the last tap multiplies the current token.
        history: [width - 1, channels], oldest first.

    Returns:
        [tokens, channels], and the new history.
    """
    window = torch.cat([history.to(x.dtype), x])
    output = (window.unfold(0, weight.shape[1], 1) * weight).sum(-1)
    return output, window[len(window) - len(history) :]


@kernel("causal_conv1d_varlen_fwd")
def causal_conv(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    pool: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    has_state: torch.Tensor,
    update: torch.Tensor,
) -> torch.Tensor:
    """Ragged convolution with bias and SiLU; the window pool is [slots, channels, width - 1]."""
    last = bool(call.attribute("channels_last", False))
    rows = (x if last else x.T).float()
    output = torch.empty_like(rows)
    for sequence, (first, end) in enumerate(pairwise(starts.tolist())):
        slot = int(slots.reshape(-1)[sequence])
        history = pool[slot].T.float()
        if has_state.numel() and not bool(has_state[sequence]):
            history = torch.zeros_like(history)
        y, new = windowed(rows[first:end], weight.float(), history)
        if bias.numel():
            y = y + bias.float()
        if call.attribute("use_residual", False):
            y = y + rows[first:end]
        output[first:end] = functional.silu(y) if call.attribute("activation") == "silu" else y
        if not update.numel() or bool(update[sequence]):
            pool[slot] = new.T.to(pool.dtype)
    return (output if last else output.T).to(x.dtype)


@kernel("gated_delta_conv1d_fwd")
def gated_delta_conv(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Ragged convolution without bias or activation, float32."""
    output = torch.empty_like(x)
    for sequence, (first, last) in enumerate(pairwise(offsets.tolist())):
        slot = int(slots.reshape(-1)[sequence])
        output[first:last], new = windowed(x[first:last], weight, pool[slot].T)
        if call.attribute("write_state", True):
            pool[slot] = new.T.to(pool.dtype)
    return output


@kernel("gated_delta_recurrence_fwd")
def gated_delta(
    call: Call,
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Gated delta rule; q and k are normalised to length 1 and q is scaled by 1/sqrt(key dim).

    Args:
        call: The op.
        qkv: [tokens, q + k + v].
        decay: [tokens, value heads].
        beta: [tokens, value heads].
        pool: [slots, value heads, key dim, value dim], float32.
        slots: [batch].
        offsets: [batch + 1].
    """
    heads, key_dim, value_dim = pool.shape[1:]
    value_size = heads * value_dim
    key_size = (qkv.shape[1] - value_size) // 2
    q, k, v = qkv.split([key_size, key_size, value_size], dim=1)
    repeat = heads // (key_size // key_dim)
    q = _unit(q.unflatten(1, (-1, key_dim))).repeat_interleave(repeat, 1) * key_dim**-0.5
    k = _unit(k.unflatten(1, (-1, key_dim))).repeat_interleave(repeat, 1)
    v = v.unflatten(1, (heads, value_dim))
    output = torch.empty_like(v)
    for sequence, (first, last) in enumerate(pairwise(offsets.tolist())):
        slot = int(slots.reshape(-1)[sequence])
        state = pool[slot].clone()
        for t in range(first, last):
            state = state * decay[t, :, None, None]
            seen = (state * k[t, :, :, None]).sum(1)
            change = (v[t] - seen) * beta[t, :, None]
            state = state + k[t, :, :, None] * change[:, None]
            output[t] = (state * q[t, :, :, None]).sum(1)
        pool[slot] = state
    return output.flatten(1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@kernel("mamba2_ssd_chunk_scan_varlen_fwd_inplace")
def mamba2_scan(
    call: Call,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    pool: torch.Tensor,
    starts: torch.Tensor,
    has_state: torch.Tensor,
    slots: torch.Tensor,
    update: torch.Tensor,
) -> torch.Tensor:
    """Mamba-2 recurrence in float32.

    Args:
        call: The op.
        x: [tokens, heads, head dim].
        dt: [tokens, heads], before bias and softplus.
        a: [heads], negative.
        b: [tokens, groups, state].
        c: [tokens, groups, state].
        d: [heads] skip weights, or empty.
        dt_bias: [heads], or empty.
        pool: [slots, heads, head dim, state].
        starts: [batch + 1].
        has_state: [batch], or empty.
        slots: [batch].
        update: [batch], or empty.
    """
    heads = x.shape[1]
    wide = x.float()
    step = dt.float() + dt_bias.float() if dt_bias.numel() else dt.float()
    if call.attribute("dt_softplus", True):
        step = functional.softplus(step)
    factor = torch.exp(step * a.float())
    repeat = heads // b.shape[1]
    into = b.float().repeat_interleave(repeat, 1)
    out = c.float().repeat_interleave(repeat, 1)
    y = torch.empty_like(wide)
    for sequence, (first, last) in enumerate(pairwise(starts.tolist())):
        slot = int(slots.reshape(-1)[sequence])
        state = pool[slot].float()
        if has_state.numel() and not bool(has_state[sequence]):
            state = torch.zeros_like(state)
        for t in range(first, last):
            added = (step[t, :, None] * wide[t])[..., None] * into[t, :, None]
            state = state * factor[t, :, None, None] + added
            y[t] = (state * out[t, :, None]).sum(-1)
        if not update.numel() or bool(update[sequence]):
            pool[slot] = state.to(pool.dtype)
    if d.numel():
        y = y + wide * d.float()[:, None]
    return y.to(x.dtype)


@kernel("gated_group_rmsnorm")
def gated_group_norm(
    call: Call, y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: torch.Tensor
) -> torch.Tensor:
    """RMSNorm in groups of y * silu(gate), float32 inside."""
    gated = y.float() * functional.silu(gate.float())
    groups = gated.unflatten(1, (-1, int(call.attribute("group_size"))))
    normal = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + float(epsilon))
    return (normal.flatten(1) * weight).to(y.dtype)


@kernel("mo.short_conv_ring")
def short_conv_ring(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    ring: torch.Tensor,
    offsets: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    layer: torch.Tensor,
) -> torch.Tensor:
    """`x + conv(x)`; the input at position p is kept at ring index p mod the ring's length."""
    length, width = ring.shape[1], weight.shape[1]
    output = torch.empty_like(x)
    for sequence, (first, last) in enumerate(pairwise(offsets.tolist())):
        slot = int(rows[int(layer), sequence])
        start = int(positions[first])
        before = torch.arange(start - width + 1, start)
        history = ring[slot, before % length] * (before >= 0)[:, None]
        y, _ = windowed(x[first:last], weight, history)
        output[first:last] = x[first:last] + y
        if call.attribute("commit"):
            kept = torch.arange(max(first, last - length), last)
            ring[slot, positions[kept].long() % length] = x[kept].to(ring.dtype)
    return output
