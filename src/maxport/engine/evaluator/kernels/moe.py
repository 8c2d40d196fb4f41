"""Mixture of experts: routers, sorting tokens by expert, grouped products, and putting back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from maxport.engine.evaluator.call import Call, Unsupported, kernel


@kernel("mo.moe.create.indices")
def create_indices(call: Call, experts: torch.Tensor) -> Sequence[torch.Tensor]:
    """Order of token slots by expert, group starts, inverse order, expert ids, usage.

    Ties keep the slots' order; MAX leaves the order within a group open.
    """
    count = int(call.shape(3)[0])
    order = torch.argsort(experts.long(), stable=True)
    usage = torch.bincount(experts.long(), minlength=count)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), usage.cumsum(0)])
    stats = torch.tensor([int(usage.max()), count])
    return [order, starts, torch.argsort(order), torch.arange(count), stats]


@kernel("mo.grouped.matmul.ragged")
def grouped_matmul(
    call: Call,
    rows: torch.Tensor,
    weight: torch.Tensor,
    starts: torch.Tensor,
    experts: torch.Tensor,
    stats: torch.Tensor,
) -> torch.Tensor:
    """Each group of rows times its expert's transposed weight, [experts, out, in]."""
    output = torch.zeros(len(rows), weight.shape[1], dtype=rows.dtype)
    bounds = starts.tolist()
    for group, expert in enumerate(experts.tolist()):
        first, last = bounds[group], bounds[group + 1]
        if last > first and expert >= 0:
            output[first:last] = rows[first:last] @ weight[expert].T
    return output


@kernel("mo.moe.finalize")
def finalize(
    call: Call, rows: torch.Tensor, restore: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Undo the sort and sum each token's expert outputs by routing weight, in float32."""
    back = rows[restore.long()].reshape(*weights.shape, -1)
    return (back.float() * weights.float()[..., None]).sum(1)


@kernel("ep.fused_silu")
def gated_activation(call: Call, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Activation of the gate half times the up half, in float32; see max.nn.activation."""
    wide = x.float()
    if call.attribute("interleaved", False):
        gate, up = wide[:, 0::2], wide[:, 1::2]
    else:
        gate, up = wide.chunk(2, dim=-1)
    name = str(call.attribute("activation", "silu"))
    limit = _number(call, "swiglu_limit")
    if name == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "silu":
        return functional.silu(gate) * up
    if name == "swigluoai":
        return gate * torch.sigmoid(_number(call, "swiglu_alpha") * gate) * (up + 1)
    raise Unsupported(f"the activation {name}")


def _number(call: Call, name: str) -> float:
    return float(call.attribute(name, 0.0))


@kernel("mo.moe.single.group.router")
def route_single_group(
    call: Call, scores: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor
) -> Sequence[torch.Tensor]:
    """The k experts of largest biased score; weights are the unbiased scores."""
    return _choose(call, scores, scores + bias, scale)


@kernel("mo.moe.router.group.limited")
def route_group_limited(
    call: Call, scores: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor
) -> Sequence[torch.Tensor]:
    """As above within the best groups; a group is rated by its two best biased scores."""
    groups = int(call.attribute("n_groups"))
    biased = scores + bias
    by_group = biased.reshape(len(scores), groups, -1)
    rating = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)
    kept = rating.topk(int(call.attribute("topk_group")), -1).indices
    allowed = torch.zeros_like(rating, dtype=torch.bool).scatter(1, kept, True)
    masked = by_group.masked_fill(~allowed[..., None], -torch.inf).reshape(biased.shape)
    return _choose(call, scores, masked, scale)


@kernel("mo.moe.sigmoid.gemv.single.group.router")
def route_sigmoid(
    call: Call, x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Gate projection and sigmoid in the gate's dtype, then the single-group router."""
    scores = torch.sigmoid(x.to(gate.dtype) @ gate.T)
    return _choose(call, scores, scores + bias, scale)


@kernel("mo.moe.sink.gate.router")
def route_sink(
    call: Call,
    logits: torch.Tensor,
    bias: torch.Tensor,
    global_scale: torch.Tensor,
    scale: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """Top k by biased sigmoid; log-sigmoids of those and of the shared experts share a softmax."""
    routed, k = int(call.attribute("n_routed_experts")), int(call.attribute("n_experts_per_tok"))
    shared = int(call.attribute("n_shared_experts"))
    wide = logits.float()
    chosen = (torch.sigmoid(wide[:, :routed]) + bias.float()).topk(k, -1).indices
    both = torch.cat([wide.gather(1, chosen), wide[:, routed : routed + shared]], -1)
    weights = torch.softmax(functional.logsigmoid(both), -1) * float(scale) * global_scale.float()
    return [chosen, weights[:, :k], weights[:, k:]]


@kernel("mo.router.gate.mixed.gemv")
def router_gate(call: Call, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """bfloat16 states times a float32 gate, in float32."""
    return x.float() @ gate.T


def _choose(
    call: Call, scores: torch.Tensor, rating: torch.Tensor, scale: torch.Tensor
) -> list[torch.Tensor]:
    k = int(call.attribute("n_experts_per_tok"))
    chosen = rating.float().topk(k, -1).indices
    weights = scores.float().gather(1, chosen)
    if call.attribute("norm_weights", True):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return [chosen, weights * float(scale)]


@kernel("mo.shard_and_stack")
def shard_and_stack(call: Call, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split each tensor along an axis, one part per device, and stack the parts of all tensors."""
    count = sum(spec is not None for spec in call.node.specs)
    if count == 1:
        return [torch.stack(tensors)]
    parts = [tensor.chunk(count, dim=int(call.attribute("axis"))) for tensor in tensors]
    return [torch.stack([part[device] for part in parts]) for device in range(count)]
