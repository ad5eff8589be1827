"""The common part of losses that are one number per token. Shapes: B sequences, T positions.

Values at masked positions are replaced *before* anything is computed from them: the gradient of
`where(mask, f(x), 0)` is NaN where f(x) is NaN, that of `f(where(mask, x, 0))` is 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.kl import MAX_LOG_RATIO
from agentrl.algorithms.losses.registry import (
    DEFAULTS,
    LossAndMetrics,
    PolicyLossFn,
    SummaryFn,
    TrainedTokens,
    register_policy_loss,
)
from agentrl.config.schema.training import ActorConfig, LossAggMode

CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
"""The settings that `clip_range` reads."""
DUAL_CLIP = (*CLIP, "clip_ratio_c")

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss, `[B, T]` each; 0 at masked positions."""

    old_log_prob: torch.Tensor
    log_prob: torch.Tensor
    """With gradient."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool."""
    config: ActorConfig
    scale: LossScale
    log_ratio: torch.Tensor
    """`log_prob - old_log_prob`, clamped so that its exponential is finite."""

    @classmethod
    def of(
        cls,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        config: ActorConfig,
        scale: LossScale | None,
    ) -> "LossInputs":
        """Mask the arguments of a policy loss."""
        mask = response_mask.bool()
        old, new = where_trained(old_log_prob, mask), where_trained(log_prob, mask)
        return cls(
            old, new, where_trained(advantages, mask), mask, config,
            scale or LossScale.of(mask), (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        )  # fmt: skip

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's part of a mean over the mini-batch's tokens, detached."""
        return self.scale.mean(values, self.mask)

    def by_sign(self, positive: float, other: float) -> torch.Tensor:
        """Return one setting for positive advantages and another for the others, `[B, T]`."""
        return by_case(self.advantages > 0, positive, other, self.log_ratio)

    def clip_metrics(
        self, clipped: torch.Tensor, clipped_lower: torch.Tensor | None = None
    ) -> Metrics:
        """Return the parts of the metrics that losses with a clip have in common.

        Args:
            clipped: `[B, T]`, bool: the clip changed the token's loss.
            clipped_lower: `[B, T]`, bool: a second bound changed it; None: there is none.

        Returns:
            `actor/ppo_kl` (k1 estimate of KL(old, new)), `actor/pg_clipfrac`,
            `actor/pg_clipfrac_lower` (shares of tokens).
        """
        lower = torch.zeros_like(clipped) if clipped_lower is None else clipped_lower
        return {
            "actor/ppo_kl": self.mean(-self.log_ratio),
            "actor/pg_clipfrac": self.mean(clipped.float()),
            "actor/pg_clipfrac_lower": self.mean(lower.float()),
        }


TokenLoss = Callable[[LossInputs], tuple[torch.Tensor, Metrics]]
"""Computes each token's loss, `[B, T]`, and this micro-batch's parts of the metrics."""


def register_token_loss(
    name: str,
    *,
    reads: Iterable[str],
    loss_agg_mode: LossAggMode | None = None,
    default_mode: LossAggMode = "token-mean",
    summarise: SummaryFn | None = None,
    only_advantages: bool = False,
    by_row: bool = False,
) -> Callable[[TokenLoss], PolicyLossFn]:
    """Make a policy loss from a loss per token, and register it.

    Args:
        name: See `register_policy_loss`.
        reads: See `register_policy_loss`.
        loss_agg_mode: See `register_policy_loss`.
        default_mode: The aggregation of a call without `loss_agg_mode`.
        summarise: See `register_policy_loss`. Without a scale, the rows are the whole mini-batch.
        only_advantages: See `register_policy_loss`.
        by_row: See `register_policy_loss`.
    """
    mode = loss_agg_mode or default_mode

    def decorate(compute_losses: TokenLoss) -> PolicyLossFn:
        def policy_loss(
            old_log_prob: torch.Tensor,
            log_prob: torch.Tensor,
            advantages: torch.Tensor,
            response_mask: torch.Tensor,
            loss_agg_mode: str = mode,
            config: ActorConfig = DEFAULTS,
            rollout_is_weights: torch.Tensor | None = None,
            *,
            scale: LossScale | None = None,
        ) -> LossAndMetrics:
            x = LossInputs.of(old_log_prob, log_prob, advantages, response_mask, config, scale)
            if scale is None and summarise is not None:
                known = TrainedTokens(x.old_log_prob[x.mask], x.advantages[x.mask])
                x = replace(x, scale=replace(x.scale, summary=summarise(known, config)))
            losses, metrics = compute_losses(x)
            return x.scale.aggregate(losses, x.mask, loss_agg_mode, rollout_is_weights), metrics

        # Not `functools.wraps`: the registry reads the signature of `policy_loss`.
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(policy_loss, attribute, getattr(compute_losses, attribute))
        register = register_policy_loss(
            name,
            loss_agg_mode=loss_agg_mode,
            summarise=summarise,
            reads=reads,
            only_advantages=only_advantages,
            by_row=by_row,
        )
        return register(policy_loss)

    return decorate


def where_trained(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put 0 at masked positions; no gradient flows there."""
    return torch.where(mask.bool(), values, 0.0)


def row_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average over each row's trained tokens, `[B, 1]`; 0 if there are none."""
    inside = mask.bool()
    sums = where_trained(values, inside).sum(dim=-1, keepdim=True)
    return sums / inside.sum(dim=-1, keepdim=True).clamp(min=1)


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """Return how far a ratio may move from 1, downwards and upwards."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def by_case(case: torch.Tensor, yes: float, no: float, like: torch.Tensor) -> torch.Tensor:
    """Choose between two settings at each token, in the dtype of `like`.

    (`torch.where` makes Python numbers float32, for any dtype of the other operands.)
    """
    return torch.where(case, like.new_tensor(yes), like.new_tensor(no))


def clip_surrogate(x: LossInputs, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the larger of each token's free and clipped loss, and a mask of the clipped ones."""
    low, high = clip_range(x.config)
    free = -x.advantages * ratio
    clipped = -x.advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(free, clipped), clipped > free
