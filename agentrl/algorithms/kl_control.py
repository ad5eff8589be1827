"""The KL to the reference as a penalty on rewards, and who decides its weight.

Shapes: B sequences, T response positions.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from agentrl.algorithms.kl import kl_penalty
from agentrl.config.schema.training import KlCtrlConfig

_MAX_ERROR = 0.2


class KLController(Protocol):
    """Decides the weight of the KL in the reward."""

    value: float
    """The weight."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Take note of a batch.

        Args:
            current_kl: Its mean KL.
            n_steps: Its sequences.
        """
        ...


class FixedKLController:
    """A weight that stays.

    Args:
        kl_coef: The weight.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Change nothing."""


class AdaptiveKLController:
    """A weight that rises where the KL is above its target, and falls where it is below.

    value <- value (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon) for a batch of n sequences.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.

    Args:
        init_kl_coef: The first weight.
        target_kl: The KL that is aimed at, more than 0.
        horizon: Sequences over which the weight moves.

    Example:
        >>> controller = AdaptiveKLController(0.1, target_kl=1.0, horizon=100)
        >>> controller.update(current_kl=2.0, n_steps=50)
        >>> round(controller.value, 6)
        0.11
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the weight; a KL that is not finite says nothing, and moves nothing."""
        if not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self.target - 1, -_MAX_ERROR), _MAX_ERROR)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(config: KlCtrlConfig) -> KLController:
    """Build the controller that is configured."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)


class MeasuredKL(NamedTuple):
    """What a controller is told of a batch."""

    current_kl: float
    """Mean over sequences of the mean over their trained tokens."""
    num_sequences: int
    """Those in which something is trained."""


def compute_reward_kl(
    old_log_probs: Tensor, ref_log_prob: Tensor, response_mask: Tensor, estimate: str = "k1"
) -> Tensor:
    """Estimate the KL to the reference at each trained token, `[B, T]`; 0 where masked.

    Args:
        old_log_probs: `[B, T]`, of the policy before the update.
        ref_log_prob: `[B, T]`, of the reference.
        response_mask: `[B, T]`, nonzero where a token is trained.
        estimate: See `kl_penalty`.

    Raises:
        ConfigError: for an unknown estimate.
    """
    mask = response_mask.bool()
    policy, reference = (torch.where(mask, x, 0.0) for x in (old_log_probs, ref_log_prob))
    return torch.where(mask, kl_penalty(policy, reference, estimate), 0.0)


def measure_kl(kl: Tensor, response_mask: Tensor) -> MeasuredKL:
    """Average the KL of tokens `[B, T]` by sequence, and over sequences."""
    tokens = response_mask.bool().sum(dim=-1)
    trained = tokens > 0
    by_row = torch.where(response_mask.bool(), kl, 0.0).double().sum(-1) / tokens.clamp(min=1)
    count = int(trained.sum())
    return MeasuredKL(float(by_row.sum()) / max(count, 1), count)


def penalize_rewards(
    token_level_scores: Tensor, kl: Tensor, kl_coef: float, exempt: Tensor | None = None
) -> Tensor:
    """Take the KL off the scores, token by token: scores - kl_coef KL.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), equation 2.

    Args:
        token_level_scores: `[B, T]`.
        kl: `[B, T]`, 0 where masked.
        kl_coef: The weight.
        exempt: `[B]` bool, sequences of which nothing is taken: those of groups that say nothing
            (equal rewards train nothing), whose equal scores the KL would make differ. None: no
            one.
    """
    penalty = kl_coef * kl
    if exempt is not None:
        penalty = torch.where(exempt[:, None], 0.0, penalty)
    return token_level_scores - penalty
