"""Algorithms of the update: advantages, policy losses, KL, aggregation, correction of the rollout.

Pure tensor functions. Names and call conventions are those of the field (verl 0.9.1). Importing
this package registers the bundled estimators and losses.
"""

import agentrl.algorithms.losses.bypass
import agentrl.algorithms.verl_variants.losses  # noqa: F401 - registers them
from agentrl.algorithms.advantages.gdpo import compute_gdpo_outcome_advantage
from agentrl.algorithms.advantages.group_relative import (
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from agentrl.algorithms.advantages.groups import GroupScores
from agentrl.algorithms.advantages.registry import (
    adv_estimator_names,
    columns_read,
    compute_advantage,
    estimator_facts,
    get_adv_estimator_fn,
    register_adv_est,
)
from agentrl.algorithms.advantages.token_baseline import compute_optimal_token_baseline_advantage
from agentrl.algorithms.advantages.token_level import (
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from agentrl.algorithms.advantages.turn_level import (
    compute_gigpo_outcome_advantage,
    compute_step_reinforce_advantage,
    compute_turn_gae_advantage,
    compute_turn_rloo_advantage,
)
from agentrl.algorithms.aggregation import LossScale, agg_loss, compute_row_weights
from agentrl.algorithms.correction.methods import reject_rollout, weigh_rollout
from agentrl.algorithms.correction.metrics import compute_offpolicy_metrics
from agentrl.algorithms.correction.rollout import (
    RolloutCorrection,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from agentrl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    MeasuredKL,
    compute_reward_kl,
    get_kl_controller,
    kl_penalty,
    measure_kl,
    penalize_rewards,
)
from agentrl.algorithms.losses.registry import (
    LossAndMetrics,
    PolicyLossFn,
    SummaryFn,
    TrainedTokens,
    effective_loss_agg_mode,
    get_policy_loss_fn,
    needs_summary,
    policy_loss_facts,
    policy_loss_names,
    register_policy_loss,
    with_summary,
)
from agentrl.algorithms.losses.token_ratio import compute_policy_loss_vanilla
from agentrl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from agentrl.algorithms.value_loss import compute_value_loss
from agentrl.algorithms.verl_variants.advantages import compute_grpo_verl_advantage

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "GroupScores",
    "KLController",
    "LossAndMetrics",
    "LossScale",
    "MeasuredKL",
    "PolicyLossFn",
    "RolloutCorrection",
    "SummaryFn",
    "TrainedTokens",
    "adv_estimator_names",
    "agg_loss",
    "columns_read",
    "compute_advantage",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gigpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_verl_advantage",
    "compute_maxrl_outcome_advantage",
    "compute_offpolicy_metrics",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_reward_kl",
    "compute_rloo_outcome_advantage",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_row_weights",
    "compute_step_reinforce_advantage",
    "compute_turn_gae_advantage",
    "compute_turn_rloo_advantage",
    "compute_value_loss",
    "effective_loss_agg_mode",
    "estimator_facts",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "measure_kl",
    "needs_summary",
    "penalize_rewards",
    "policy_loss_facts",
    "policy_loss_names",
    "register_adv_est",
    "register_policy_loss",
    "reject_rollout",
    "weigh_rollout",
    "with_summary",
]
