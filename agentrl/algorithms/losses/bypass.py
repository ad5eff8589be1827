"""The loss of a run with the engine's log-probabilities as `old_log_probs`.

Shapes: B sequences, T response positions.
"""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.correction.methods import reject_rollout, weigh_rollout
from agentrl.algorithms.losses.registry import DEFAULTS, LossAndMetrics, register_policy_loss
from agentrl.algorithms.losses.token_loss import DUAL_CLIP, where_trained
from agentrl.algorithms.losses.token_ratio import (
    compute_policy_loss_gpg,
    compute_policy_loss_vanilla,
)
from agentrl.config.schema.training import ActorConfig
from agentrl.errors import ConfigError


@register_policy_loss("bypass_mode", reads=DUAL_CLIP, only_advantages=True, by_row=True)
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
    """Correct for the engine in the loss itself, without recomputed log-probabilities.

    `old_log_prob` is the engine's. With `loss_type: ppo_clip` the correction is the clip of the
    ratio to it, as in `vanilla`. With `reinforce` a token's loss is -A sg(w) log pi, with the
    weight w of `rollout_is`. Tokens that `rollout_rs` rejects under the *current* policy are left
    out. The denominators are the mini-batch's before rejection: the number of tokens that later
    micro-batches reject is not known yet.

    Source: verl 0.9.1's loss of this name; see `agentrl.algorithms.correction`.

    Returns:
        The loss, the metrics of the loss that is used, `rollout_corr/rollout_rs_masked_fraction`
        and, with weights, `rollout_corr/rollout_is_mean`.

    Raises:
        ConfigError: with `rollout_is_batch_normalize` (the mean of a mini-batch's weights is not
            known in its micro-batches), and for weights or tests of turns (a loss has no turns).
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    correction = config.policy_loss.rollout_correction.effective
    if correction.rollout_is_batch_normalize:
        raise ConfigError(
            "bypass_mode cannot normalize weights over a mini-batch: the loss sees parts of it",
            key="algorithm.rollout_correction.rollout_is_batch_normalize",
            expected="false with bypass_mode",
        )
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
