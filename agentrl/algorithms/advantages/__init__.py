"""Advantage estimators. Importing this package registers the bundled ones."""

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
from agentrl.algorithms.verl_variants.advantages import compute_grpo_verl_advantage

__all__ = [
    "GroupScores",
    "adv_estimator_names",
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
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_step_reinforce_advantage",
    "compute_turn_gae_advantage",
    "compute_turn_rloo_advantage",
    "estimator_facts",
    "get_adv_estimator_fn",
    "register_adv_est",
]
