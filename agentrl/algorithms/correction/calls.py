"""Weights and rejection as verl's functions are called: settings one by one, metrics beside."""

from torch import Tensor

from agentrl.algorithms.correction.metrics import Metrics, compute_is_metrics, compute_rs_metrics
from agentrl.algorithms.correction.rejection import reject_rollout
from agentrl.algorithms.correction.weights import weigh_rollout
from agentrl.config.schema.correction import Level, RolloutCorrectionConfig


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: Level = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
    *,
    turn_ids: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Weigh tokens (see `agentrl.algorithms.correction.weights.weigh_rollout`).

    Returns:
        `[B, T]` float32, 0 where masked; metrics without prefix.
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
    """Reject tokens (see `agentrl.algorithms.correction.rejection.reject_rollout`).

    Returns:
        `[B, T]` of the mask's type, 0 where masked or rejected; metrics without prefix.
    """
    config = RolloutCorrectionConfig(
        rollout_rs=rollout_rs, rollout_rs_threshold=rollout_rs_threshold
    )
    found = reject_rollout(log_ratio, response_mask, config, turn_ids)
    return found.kept.to(response_mask.dtype), compute_rs_metrics(found, response_mask)
