"""The correction of a whole batch. Shapes: B sequences, T response positions."""

from typing import NamedTuple

from torch import Tensor

from agentrl.algorithms.correction.methods import reject_rollout, weigh_rollout
from agentrl.algorithms.correction.metrics import (
    Metrics,
    compute_is_metrics,
    compute_offpolicy_metrics,
    compute_rs_metrics,
)
from agentrl.config.schema.correction import Level, RolloutCorrectionConfig

PREFIX = "rollout_corr/"


class RolloutCorrection(NamedTuple):
    """The correction of a batch."""

    weights: Tensor | None
    """`[B, T]` float32, factors of the tokens' losses; None: there are none."""
    kept: Tensor
    """`[B, T]` bool: trained tokens that were not rejected."""
    metrics: Metrics
    """With the prefix `rollout_corr/`."""


def compute_rollout_correction_and_rejection_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    turn_ids: Tensor | None = None,
) -> RolloutCorrection:
    """Correct a batch for the distance between the trainer's policy and the engine's.

    All trained tokens have weights, also rejected ones; only `kept` shows the rejection. Without a
    configured correction there are metrics only. Values at masked positions, NaN included, have
    no effect.

    Args:
        old_log_probs: `[B, T]`, the trainer's, before the update.
        rollout_log_probs: `[B, T]`, the engine's.
        response_mask: `[B, T]`, nonzero at trained tokens.
        config: The weights and tests.
        turn_ids: `[B, T]`, the turn of each token, for weights or tests of turns.

    Raises:
        ConfigError: see `weigh_rollout` and `reject_rollout`.
    """
    own, mask = config.effective, response_mask.bool()
    log_ratio = old_log_probs - rollout_log_probs
    metrics = compute_offpolicy_metrics(old_log_probs, rollout_log_probs, mask)
    weights, kept = None, mask
    if own.rollout_is is not None:
        found = weigh_rollout(log_ratio, mask, own, turn_ids)
        weights = found.weights
        metrics |= compute_is_metrics(found)
    if own.rollout_rs is not None:
        rejected = reject_rollout(log_ratio, mask, own, turn_ids)
        kept = rejected.kept
        metrics |= compute_rs_metrics(rejected, mask)
    return RolloutCorrection(weights, kept, {PREFIX + name: x for name, x in metrics.items()})


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: Level = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
    *,
    turn_ids: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Weight tokens, with verl's arguments (see `weigh_rollout`).

    Returns:
        `[B, T]` float32, 0 at masked positions; metrics without prefix.
    """
    config = RolloutCorrectionConfig(
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
    )
    found = weigh_rollout(log_ratio, response_mask, config, turn_ids)
    return found.weights, compute_is_metrics(found)


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
    *,
    turn_ids: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Reject tokens, with verl's arguments (see `reject_rollout`).

    Returns:
        `[B, T]` of the mask's type, 0 at masked and rejected positions; metrics without prefix.
    """
    config = RolloutCorrectionConfig(
        rollout_rs=rollout_rs, rollout_rs_threshold=rollout_rs_threshold
    )
    found = reject_rollout(log_ratio, response_mask, config, turn_ids)
    return found.kept.to(response_mask.dtype), compute_rs_metrics(found, response_mask)
