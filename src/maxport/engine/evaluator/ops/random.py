"""Random numbers: the distribution is MAX's, the numbers are not; its generator is its own."""

from __future__ import annotations

import torch

from maxport.engine.evaluator.call import Call, op


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed.reshape(-1)[0].item()))


@op("random.normal")
def normal(
    call: Call,
    shape: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    seed: torch.Tensor,
) -> torch.Tensor:
    """Normally distributed values."""
    sample = torch.randn(call.shape(), generator=_generator(seed))
    return sample * deviation.float() + mean.float()


@op("random.uniform")
def uniform(
    call: Call, shape: torch.Tensor, low: torch.Tensor, high: torch.Tensor, seed: torch.Tensor
) -> torch.Tensor:
    """Uniformly distributed values."""
    sample = torch.rand(call.shape(), generator=_generator(seed))
    return sample * (high.float() - low.float()) + low.float()
