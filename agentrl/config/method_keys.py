"""Which keys each bundled estimator and policy loss reads; a test holds this against the code.

What a method of the user's own reads is not known: it stands in no table here.
"""

from collections.abc import Mapping

from agentrl.config.schema.run import RunConfig

_CLIP = frozenset({"actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high"})
_DUAL_CLIP = _CLIP | {"actor.clip_ratio_c"}
_CLIP_COV = _CLIP | {
    f"actor.policy_loss.{name}" for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")
}
_KL_COV = frozenset({"actor.policy_loss.kl_cov_ratio", "actor.policy_loss.ppo_kl_coef"})
_SAPO = frozenset({"actor.tau_pos", "actor.tau_neg"})
_VESPO = frozenset(
    f"actor.policy_loss.vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
)
_NOTHING: frozenset[str] = frozenset()

KEYS_OF_LOSS: Mapping[str, frozenset[str]] = {
    "vanilla": _DUAL_CLIP,
    "dr_grpo": _CLIP,
    "bnpo": _CLIP,
    "dppo_tv": _DUAL_CLIP,
    "dppo_kl": _DUAL_CLIP,
    "gspo": _CLIP,
    "luspo": _CLIP,
    "geo_mean": _CLIP,
    "geo_mean_verl": _CLIP,
    "cispo": _CLIP,
    "clip_cov": _CLIP_COV,
    "clip_cov_verl": _CLIP_COV,
    "kl_cov": _KL_COV,
    "kl_cov_verl": _KL_COV,
    "sapo": _SAPO,
    "sapo_verl": _SAPO,
    "vespo": _VESPO,
    "dro": frozenset({"actor.policy_loss.dro_beta"}),
    "gpg": _NOTHING,
    "bypass_mode": _DUAL_CLIP,
}
"""By the name in `actor.policy_loss`: what it reads of the keys that some loss reads."""

_GAMMA = frozenset({"algorithm.gamma"})
_GAE = _GAMMA | {"algorithm.lam"}
_STD = frozenset({"algorithm.norm_adv_by_std_in_grpo"})
_GDPO = _STD | {"algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"}

KEYS_OF_ESTIMATOR: Mapping[str, frozenset[str]] = {
    "gae": _GAE,
    "gae_verl": _GAE,
    "grpo": _STD,
    "grpo_verl": _STD,
    "grpo_vectorized": _STD,
    "grpo_vectorized_verl": _STD,
    "grpo_passk": _STD,
    "grpo_passk_verl": _STD,
    "gdpo": _GDPO,
    "gdpo_verl": _GDPO,
    "reinforce_plus_plus": _GAMMA,
    "reinforce_plus_plus_baseline": _NOTHING,
    "reinforce_plus_plus_baseline_verl": _NOTHING,
    "remax": _NOTHING,
    "remax_verl": _NOTHING,
    "rloo": _NOTHING,
    "rloo_verl": _NOTHING,
    "rloo_vectorized": _NOTHING,
    "rloo_vectorized_verl": _NOTHING,
    "opo": _NOTHING,
    "opo_verl": _NOTHING,
    "gpg": _NOTHING,
    "gpg_verl": _NOTHING,
    "maxrl": _NOTHING,
    "optimal_token_baseline": _NOTHING,
    "optimal_token_baseline_verl": _NOTHING,
    "tir_optimal_token_baseline": _NOTHING,
    "tir_optimal_token_baseline_verl": _NOTHING,
    "gigpo": _GAMMA | _STD | {"algorithm.step_advantage_w"},
    "step_reinforce": _GAMMA | _STD,
    "turn_gae": _GAE,
    "turn_rloo": _GAMMA,
}
"""By the name in `algorithm.adv_estimator`: what it reads of the keys that some estimator reads."""

GROUP_ESTIMATORS = frozenset({
    "grpo", "grpo_vectorized", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline", "rloo",
    "rloo_vectorized", "opo", "gpg", "maxrl", "optimal_token_baseline",
    "tir_optimal_token_baseline", "gigpo", "step_reinforce", "turn_rloo",
})  # fmt: skip
"""Those that compare the samples of a group, and train on nothing in a group of one."""
_VALUES = "values, which a critic gives"
INPUTS_NOT_MADE: Mapping[str, str] = {"gae": _VALUES, "gae_verl": _VALUES, "turn_gae": _VALUES}
"""Estimators that are there for loops of the user's own: no run file makes what they need."""
READ_SQUARES = frozenset({
    "optimal_token_baseline", "optimal_token_baseline_verl", "tir_optimal_token_baseline",
    "tir_optimal_token_baseline_verl",
})  # fmt: skip
"""Estimators that read `sum_pi_squared`, which the pass for `old_log_probs` gives."""
SUM_ESTIMATORS = frozenset({
    "grpo", "grpo_verl", "grpo_vectorized", "grpo_vectorized_verl", "grpo_passk", "grpo_passk_verl",
    "reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline_verl", "rloo",
    "rloo_verl", "rloo_vectorized", "rloo_vectorized_verl", "opo", "opo_verl", "gpg", "gpg_verl",
    "maxrl",
})  # fmt: skip
"""Those that read the sum of a row's rewards: on which tokens these lie is nothing to them."""
TURN_ESTIMATORS = frozenset({"gigpo", "step_reinforce", "turn_gae", "turn_rloo"})
"""Those that read the sum of each turn's rewards."""
FIXED_AGGREGATION: Mapping[str, str] = {
    "dr_grpo": "seq-mean-token-sum-norm",
    "bnpo": "token-mean",
    "luspo": "seq-mean-token-sum",
    "sapo_verl": "seq-mean-token-mean",
}
"""Losses of which an aggregation is a part."""


def chosen_loss(config: RunConfig) -> str:
    """Name the loss that trains: under `bypass_mode` it is that mode's own."""
    bypasses = config.algorithm.rollout_correction.effective.bypass_mode
    return "bypass_mode" if bypasses else config.actor.policy_loss.loss_mode


def is_gdpo(config: RunConfig) -> bool:
    """Whether the estimator compares single rewards of the scorer's, and not their sum."""
    return config.algorithm.adv_estimator in ("gdpo", "gdpo_verl")
