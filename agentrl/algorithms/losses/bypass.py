"""The loss of a run whose `old_log_probs` are the engine's. Shapes: B sequences, T positions."""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.correction.rejection import reject_rollout
from agentrl.algorithms.correction.weights import weigh_rollout
from agentrl.algorithms.losses.likelihood import compute_policy_loss_gpg
from agentrl.algorithms.losses.ratio import where_trained
from agentrl.algorithms.losses.registry import (
    DEFAULTS,
    DUAL_CLIP,
    LossAndMetrics,
    register_policy_loss,
)
from agentrl.algorithms.losses.vanilla import compute_policy_loss_vanilla
from agentrl.config.schema.correction import RolloutCorrectionConfig
from agentrl.config.schema.run import ActorConfig
from agentrl.errors import ConfigError


@register_policy_loss("bypass_mode", reads=DUAL_CLIP)
def compute_policy_loss_bypass_mode(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig = DEFAULTS,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    scale: LossScale | None = None,
) -> LossAndMetrics:
    """Correct for the engine in the loss itself, where no log-probability was recomputed.

    `old_log_prob` is the engine's. Under `loss_type: ppo_clip` the ratio to it is clipped as in
    `vanilla`: that is the correction. Under `reinforce` a token's loss is -A sg(w) log pi, with the
    weight w of `rollout_is`. Tokens that `rollout_rs` rejects under the *current* policy are left
    out. The denominators are the mini-batch's before rejection: how many tokens the micro-batches
    to come will reject is not known yet.

    Source: verl 0.9.1's loss of this name; see `agentrl.algorithms.correction`.

    Returns:
        The loss, the metrics of the loss that is used, `rollout_corr/rollout_rs_masked_fraction`
        and, with weights, `rollout_corr/rollout_is_mean`.

    Raises:
        ConfigError: with `rollout_is_batch_normalize` (the mean of the weights of a mini-batch is
            not known in its micro-batches) and for weights or tests of turns, which it cannot see.
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    correction = _checked(config.policy_loss.rollout_correction.effective)
    log_ratio = where_trained(log_prob.detach(), mask) - where_trained(old_log_prob, mask)
    kept = mask
    if correction.rollout_rs is not None:
        kept = reject_rollout(log_ratio, mask, correction).kept
    reported = {"rollout_corr/rollout_rs_masked_fraction": scale.mean((mask & ~kept).float(), mask)}
    function = compute_policy_loss_vanilla
    if correction.loss_type == "reinforce":
        function = compute_policy_loss_gpg
        if correction.rollout_is is not None:
            weights = weigh_rollout(log_ratio, mask, correction).weights
            reported["rollout_corr/rollout_is_mean"] = scale.mean(weights, mask)
            given = 1.0 if rollout_is_weights is None else where_trained(rollout_is_weights, mask)
            rollout_is_weights = weights * given
    loss, metrics = function(
        old_log_prob, log_prob, advantages, kept, loss_agg_mode, config, rollout_is_weights,
        scale=scale,
    )  # fmt: skip
    return loss, metrics | reported


def _checked(correction: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    if correction.rollout_is_batch_normalize:
        raise ConfigError(
            "the bypass cannot normalise weights over a mini-batch that it sees in parts",
            key="algorithm.rollout_correction.rollout_is_batch_normalize",
            expected="false under bypass_mode",
        )
    return correction
