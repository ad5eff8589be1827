"""The ratio of the policy to the one that sampled, kept finite. Shapes: B sequences, T positions.

What stands on masked positions is replaced *before* anything is computed with it: the gradient of
`where(mask, f(x), 0)` is NaN where f(x) is, that of `f(where(mask, x, 0))` is 0.
"""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.kl import MAX_LOG_RATIO
from agentrl.config.schema.run import ActorConfig

MAX_SEQUENCE_LOG_RATIO = 10.0
"""The mean log-ratio of a sequence is clamped to this from above before it is exponentiated."""


def where_trained(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put 0 where nothing is trained; no gradient flows there."""
    return torch.where(mask.bool(), values, 0.0)


def clamped_log_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The log of the policy's ratio, clamped so that its exponential is finite; 0 where masked."""
    log_ratio = where_trained(log_prob, mask) - where_trained(old_log_prob, mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average over each row's trained tokens, `[B, 1]`; 0 where there are none."""
    inside = mask.bool()
    sums = where_trained(values, inside).sum(dim=-1, keepdim=True)
    return sums / inside.sum(dim=-1, keepdim=True).clamp(min=1)


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """How far a ratio may move from 1, downwards and upwards."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def by_case(case: torch.Tensor, yes: float, no: float, like: torch.Tensor) -> torch.Tensor:
    """Choose between two settings at each token, in the precision of `like`.

    (`torch.where` makes numbers float32, whatever it is computed with afterwards.)
    """
    return torch.where(case, like.new_tensor(yes), like.new_tensor(no))


def clip_metrics(
    scale: LossScale,
    mask: torch.Tensor,
    log_ratio: torch.Tensor,
    clipped: torch.Tensor,
    clipped_lower: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Parts of the metrics that losses with a clip have in common.

    Args:
        scale: The mini-batch's denominators.
        mask: `[B, T]`, nonzero where a token is trained.
        log_ratio: `[B, T]`.
        clipped: `[B, T]`, bool: the clip changed the token's loss.
        clipped_lower: `[B, T]`, bool: so did a second bound; None: there is none.

    Returns:
        `actor/ppo_kl` (k1 estimate of KL(old, new)), `actor/pg_clipfrac`,
        `actor/pg_clipfrac_lower` (shares of tokens).
    """
    lower = torch.zeros_like(clipped) if clipped_lower is None else clipped_lower
    return {
        "actor/ppo_kl": scale.mean(-log_ratio, mask),
        "actor/pg_clipfrac": scale.mean(clipped.float(), mask),
        "actor/pg_clipfrac_lower": scale.mean(lower.float(), mask),
    }
