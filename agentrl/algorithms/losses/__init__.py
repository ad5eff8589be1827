"""Policy losses. Importing this package registers the bundled ones."""

from agentrl.algorithms.losses.bypass import compute_policy_loss_bypass_mode, compute_value_loss
from agentrl.algorithms.losses.covariance import (
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
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
from agentrl.algorithms.losses.sequence_ratio import (
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    compute_policy_loss_luspo,
)
from agentrl.algorithms.losses.token_ratio import (
    compute_policy_loss_bnpo,
    compute_policy_loss_cispo,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dr_grpo,
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
    compute_policy_loss_vespo,
)
from agentrl.algorithms.verl_variants.losses import (
    compute_policy_loss_clip_cov_verl,
    compute_policy_loss_geo_mean_verl,
    compute_policy_loss_kl_cov_verl,
    compute_policy_loss_sapo_verl,
)

__all__ = [
    "LossAndMetrics",
    "PolicyLossFn",
    "SummaryFn",
    "TrainedTokens",
    "compute_policy_loss_bnpo",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_clip_cov_verl",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dr_grpo",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_geo_mean_verl",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_kl_cov_verl",
    "compute_policy_loss_luspo",
    "compute_policy_loss_sapo",
    "compute_policy_loss_sapo_verl",
    "compute_policy_loss_vanilla",
    "compute_policy_loss_vespo",
    "compute_value_loss",
    "effective_loss_agg_mode",
    "get_policy_loss_fn",
    "needs_summary",
    "policy_loss_facts",
    "policy_loss_names",
    "register_policy_loss",
    "with_summary",
]
