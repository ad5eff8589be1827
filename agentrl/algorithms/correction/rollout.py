"""A batch's whole correction: weights, rejection, metrics. Shapes: B sequences, T positions."""

from typing import NamedTuple

from torch import Tensor

from agentrl.algorithms.correction.metrics import (
    Metrics,
    compute_is_metrics,
    compute_offpolicy_metrics,
    compute_rs_metrics,
)
from agentrl.algorithms.correction.rejection import reject_rollout
from agentrl.algorithms.correction.weights import weigh_rollout
from agentrl.config.schema.correction import RolloutCorrectionConfig

PREFIX = "rollout_corr/"


class RolloutCorrection(NamedTuple):
    """What the update is given."""

    weights: Tensor | None
    """`[B, T]` float32, multiplied to the loss of each token; None: there are none."""
    kept: Tensor
    """`[B, T]` bool: trained tokens that were not rejected."""
    metrics: Metrics
    """Under `rollout_corr/`."""


def compute_rollout_correction_and_rejection_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    turn_ids: Tensor | None = None,
) -> RolloutCorrection:
    """Correct a batch for the distance of the trainer's policy from the one that sampled it.

    Weights are of all trained tokens, rejected ones too: what is rejected shows in `kept` alone.
    Where nothing is configured there are metrics only. What stands on masked tokens, NaN included,
    has no effect (observations are invisible).

    Args:
        old_log_probs: `[B, T]`, the trainer's, before the update.
        rollout_log_probs: `[B, T]`, the engine's.
        response_mask: `[B, T]`, nonzero where a token is trained.
        config: Which weights and tests.
        turn_ids: `[B, T]`, the turn of each token, where turns are weighed or rejected.

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
