"""The KL divergence to the reference: estimates per token, and the penalty on rewards.

Shapes: B sequences, T response positions.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from agentrl.config.schema.training import KlCtrlConfig
from agentrl.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this in both directions before they are exponentiated."""
MAX_K3 = 10.0
"""The k3 estimate of one token is clamped to this."""
_MAX_ERROR = 0.2


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str = "k3") -> Tensor:
    """Estimate KL(policy, reference) at each token, from the sampled token alone.

    ========== ============== ==================================================
    name       also named     with d = logprob - ref_logprob
    ========== ============== ==================================================
    `k1`       `kl`           d: unbiased, of either sign; its gradient is not the KL's
    `abs`                     |d|
    `k2`       `mse`          d^2 / 2: biased, and its expected gradient is the KL's
    `k3`       `low_var_kl`   exp(-d) + d - 1: unbiased, never negative
    `<name>+`                 the value of `<name>` with the gradient of k2
    ========== ============== ==================================================

    Source: Schulman, "Approximating KL divergence" (2020); names and clamps are verl's.

    Args:
        logprob: Of the policy, with gradient, any shape.
        ref_logprob: Of the reference, same shape.
        kl_penalty: A name from the table.

    Raises:
        ConfigError: for another name.
    """
    name = kl_penalty.removesuffix("+")
    if name not in _ESTIMATES:
        raise ConfigError(
            f"unknown KL estimate {name!r}",
            key="actor.kl_loss_type",
            expected=f"one of {', '.join(_ESTIMATES)}, each also with a + at its end",
        )
    difference = logprob - ref_logprob
    estimate = _ESTIMATES[name](difference)
    if name == kl_penalty:
        return estimate
    carrier = _k2(difference)
    return carrier - carrier.detach() + estimate.detach()


def _k1(difference: Tensor) -> Tensor:
    return difference


def _k2(difference: Tensor) -> Tensor:
    return 0.5 * difference.square()


def _k3(difference: Tensor) -> Tensor:
    clamped = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.exp(-clamped) + clamped - 1).clamp(max=MAX_K3)


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1, "kl": _k1, "abs": torch.abs, "k2": _k2, "mse": _k2, "k3": _k3, "low_var_kl": _k3,
}  # fmt: skip


class KLController(Protocol):
    """Chooses the weight of the KL in the reward."""

    value: float
    """The weight."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the weight to a batch.

        Args:
            current_kl: Mean KL of the batch.
            n_steps: Sequences of the batch.
        """
        ...


class FixedKLController:
    """A constant weight.

    Args:
        kl_coef: The weight.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Change nothing."""


class AdaptiveKLController:
    """A weight that rises while the KL is above its target, and falls while it is below.

    value <- value (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon) for a batch of n sequences.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.

    Args:
        init_kl_coef: The first weight.
        target_kl: The target KL, more than 0.
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
        """Move the weight; a KL that is not finite does not move it."""
        if not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self.target - 1, -_MAX_ERROR), _MAX_ERROR)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(config: KlCtrlConfig) -> KLController:
    """Build the configured controller."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)


class MeasuredKL(NamedTuple):
    """The KL of a batch, as a controller reads it."""

    current_kl: float
    """Mean over sequences of the mean over their trained tokens."""
    num_sequences: int
    """Sequences with a trained token."""


def compute_reward_kl(
    old_log_probs: Tensor, ref_log_prob: Tensor, response_mask: Tensor, estimate: str = "k1"
) -> Tensor:
    """Estimate the KL to the reference at each trained token, `[B, T]`; 0 at masked positions.

    Args:
        old_log_probs: `[B, T]`, of the policy before the update.
        ref_log_prob: `[B, T]`, of the reference.
        response_mask: `[B, T]`, nonzero at trained tokens.
        estimate: See `kl_penalty`.

    Raises:
        ConfigError: for an unknown estimate.
    """
    mask = response_mask.bool()
    policy, reference = (torch.where(mask, x, 0.0) for x in (old_log_probs, ref_log_prob))
    return torch.where(mask, kl_penalty(policy, reference, estimate), 0.0)


def measure_kl(kl: Tensor, response_mask: Tensor) -> MeasuredKL:
    """Average the KL of tokens `[B, T]` over each sequence, then over sequences."""
    tokens = response_mask.bool().sum(dim=-1)
    by_row = torch.where(response_mask.bool(), kl, 0.0).double().sum(-1) / tokens.clamp(min=1)
    count = int((tokens > 0).sum())
    return MeasuredKL(float(by_row.sum()) / max(count, 1), count)


def penalize_rewards(
    token_level_scores: Tensor, kl: Tensor, kl_coef: float, exempt: Tensor | None = None
) -> Tensor:
    """Subtract the KL from the scores, token by token: scores - kl_coef KL.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), equation 2.

    Args:
        token_level_scores: `[B, T]`.
        kl: `[B, T]`, 0 at masked positions.
        kl_coef: The weight.
        exempt: `[B]` bool, sequences without a penalty: those of groups with all scores
            equal. The penalty would make these scores differ, and equal rewards must train
            nothing. None: no sequence is exempt.
    """
    penalty = kl_coef * kl
    if exempt is not None:
        penalty = torch.where(exempt[:, None], 0.0, penalty)
    return token_level_scores - penalty
