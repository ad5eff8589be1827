"""Policy losses, by name. Shapes: B sequences, T response positions.

A loss of your own, in ten lines::

    @register_policy_loss("reinforce")
    def compute_reinforce_loss(
        old_log_prob, log_prob, advantages, response_mask,
        loss_agg_mode="token-mean", config=None, rollout_is_weights=None, *, scale=None,
    ):
        scale = scale or LossScale.of(response_mask)
        return scale.aggregate(-advantages * log_prob, response_mask, loss_agg_mode), {}
"""

import inspect
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.kl import MAX_LOG_RATIO
from agentrl.config.schema import ActorConfig
from agentrl.errors import ConfigError
from agentrl.plugins.registry import Registry

LossAndMetrics = tuple[torch.Tensor, dict[str, torch.Tensor]]
F = TypeVar("F", bound=Callable[..., LossAndMetrics])


class PolicyLossFn(Protocol):
    """What a policy loss is. The parameters are the reference's, and `scale`."""

    def __call__(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = ...,
        config: ActorConfig = ...,
        rollout_is_weights: torch.Tensor | None = ...,
        *,
        scale: LossScale | None = ...,
    ) -> LossAndMetrics:
        """Compute one micro-batch's part of the loss, and of each metric (parts add up).

        Args:
            old_log_prob: `[B, T]`, recomputed before the update.
            log_prob: `[B, T]`, with gradient.
            advantages: `[B, T]`.
            response_mask: `[B, T]`, nonzero where a token is trained.
            loss_agg_mode: See `agentrl.algorithms.aggregation`.
            config: Clips and coefficients.
            rollout_is_weights: `[B, T]`, multiplied to the loss of each token; None: 1.
            scale: The mini-batch's denominators; None: these rows are the whole mini-batch.
        """
        ...


_POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss", key="actor.policy_loss")
_DEFAULTS = ActorConfig()


def register_policy_loss(name: str) -> Callable[[F], F]:
    """Decorate a policy loss, so that `actor.policy_loss` finds it under `name`.

    Raises:
        ConfigError: where the name is taken, or the function does not take `scale` (without which
            a mini-batch would be weighted by how it was cut into micro-batches).
    """

    def put(function: F) -> F:
        if "scale" not in inspect.signature(function).parameters:
            raise ConfigError(
                f"the policy loss {name!r} takes no `scale`",
                expected="a keyword `scale: LossScale | None = None`, for `scale.aggregate(...)`",
            )
        return _POLICY_LOSSES.register(name)(function)

    return put


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Find a policy loss by name.

    Raises:
        ConfigError: for an unknown name.
    """
    return _POLICY_LOSSES.get(name)


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig = _DEFAULTS,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Clip the policy's ratio: PPO with separate clips below and above, and the dual clip.

    With ratio r and advantage A, a token's loss is max(-A r, -A clip(r, 1 - low, 1 + high)); where
    A < 0 it is at most -A c.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; Ye et al. 2020 (1912.09729), eq. 5, for
    the dual clip; Yu et al. 2025 (2503.14476), section 3.1, for the two clips.

    Returns:
        The loss, and `actor/ppo_kl` (k1 estimate of KL(old, new)), `actor/pg_clipfrac` (share of
        tokens whose ratio is clipped), `actor/pg_clipfrac_lower` (share on the dual clip).
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    log_ratio = clamped_log_ratio(log_prob, old_log_prob, mask)
    ratio = log_ratio.exp()
    advantages = torch.where(mask, advantages, 0.0)
    low, high = clip_range(config)

    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    worst = torch.maximum(free, clipped)
    bound = -advantages * config.clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(bound, worst), worst)
    if rollout_is_weights is not None:
        losses = losses * torch.where(mask, rollout_is_weights, 0.0)

    metrics = {
        "actor/ppo_kl": scale.mean(-log_ratio, mask),
        "actor/pg_clipfrac": scale.mean((clipped > free).float(), mask),
        "actor/pg_clipfrac_lower": scale.mean(((worst > bound) & (advantages < 0)).float(), mask),
    }
    return scale.aggregate(losses, mask, loss_agg_mode), metrics


def clamped_log_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The log of the policy's ratio, clamped so that its exponential is finite; 0 where masked."""
    log_ratio = torch.where(mask.bool(), log_prob - old_log_prob, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """How far a ratio may move from 1, downwards and upwards."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high
