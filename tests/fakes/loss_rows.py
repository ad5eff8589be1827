"""One row of tokens, all of them trained, for losses that are worked out by hand."""

import math

import torch

from agentrl.algorithms import get_policy_loss_fn
from agentrl.config.schema.training import ActorConfig


def column(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def call(name, old, new, advantages, mode="token-sum", **settings):
    """One row, all of it trained."""
    config = ActorConfig.model_validate(
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0} | settings
    )
    return get_policy_loss_fn(name)(old, new, advantages, torch.ones_like(old), mode, config)


def log(*ratios: float) -> torch.Tensor:
    return column(*(math.log(ratio) for ratio in ratios))
