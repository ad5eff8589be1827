"""From rewards to gradients: advantages, policy losses, KL, aggregation. Pure tensor functions.

Names and call conventions are the field's (verl 0.9.1). Importing this package registers the
bundled estimators and losses.
"""

from agentrl.algorithms.advantages import (
    columns_read,
    compute_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from agentrl.algorithms.aggregation import LossScale, agg_loss, masked_mean, masked_sum
from agentrl.algorithms.grpo import (
    compute_grpo_outcome_advantage,
    compute_grpo_verl_singleton_advantage,
)
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.losses import (
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)

__all__ = [
    "LossScale",
    "agg_loss",
    "columns_read",
    "compute_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_verl_singleton_advantage",
    "compute_policy_loss_vanilla",
    "get_adv_estimator_fn",
    "get_policy_loss_fn",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "register_adv_est",
    "register_policy_loss",
]
