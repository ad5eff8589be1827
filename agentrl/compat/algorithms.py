"""Estimators, and the rollout correction with the arguments of verl 0.6.1."""

import math
from enum import StrEnum

import torch
from pydantic import ConfigDict
from torch import Tensor

from agentrl.algorithms import correction, get_adv_estimator_fn, get_policy_loss_fn
from agentrl.algorithms.correction.rollout import PREFIX
from agentrl.config.schema.correction import RolloutCorrectionConfig
from agentrl.config.schema.training import ActorConfig as OwnActorConfig
from agentrl.protocol import DataProto

compute_grpo_vectorized_outcome_advantage = get_adv_estimator_fn("grpo_vectorized")
compute_rloo_vectorized_outcome_advantage = get_adv_estimator_fn("rloo_vectorized")

_TESTS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""The name of each test in 0.6.1, and here."""


class AdvantageEstimator(StrEnum):
    """Names of verl's estimators."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute PPO's loss: the loss, the clipped share, the KL, the share of the lower clip."""
    low, high = (cliprange if one is None else one for one in (cliprange_low, cliprange_high))
    given = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": clip_ratio_c}
    loss, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=loss_agg_mode,
        config=ActorConfig.model_validate(given),
    )  # fmt: skip
    clipped, kl, lower = (
        torch.as_tensor(metrics[f"actor/{name}"])
        for name in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
    )
    return loss, clipped, kl, lower


class ActorConfig(OwnActorConfig):
    """Settings for a policy loss that is called directly; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | None = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | None = 2.0,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
    rollout_is_batch_normalize: bool = False,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """Compute weights and rejection (see `agentrl.algorithms.correction`).

    Returns:
        The weights under `rollout_is_weights`, or None; the mask without the rejected tokens;
        metrics under `rollout_corr/`.

    Raises:
        ValueError: if nothing is trained, or a threshold is missing or not positive.
    """
    if not response_mask.any():
        raise ValueError("response_mask keeps no token")
    keys: dict[str, object] = {}
    if rollout_is is not None and rollout_is_threshold is not None:
        keys |= {"rollout_is": rollout_is, "rollout_is_threshold": rollout_is_threshold}
        keys["rollout_is_batch_normalize"] = rollout_is_batch_normalize
    if rollout_rs is not None:
        if rollout_rs_threshold is None:
            raise ValueError("rollout_rs_threshold is None, and rollout_rs needs one")
        lower = rollout_rs_threshold_lower or 1 / rollout_rs_threshold
        keys["rollout_rs"] = _TESTS.get(rollout_rs, rollout_rs)
        keys["rollout_rs_threshold"] = f"{lower!r}_{float(rollout_rs_threshold)!r}"
    found = correction.compute_rollout_correction_and_rejection_mask(
        old_log_prob,
        rollout_log_prob,
        response_mask,
        RolloutCorrectionConfig.model_validate(keys),
    )
    kept, veto = _veto(
        old_log_prob - rollout_log_prob, response_mask.bool(), rollout_token_veto_threshold
    )
    mask = response_mask * found.kept.to(response_mask.dtype) * kept.to(response_mask.dtype)
    weights = None
    if found.weights is not None:
        weights = DataProto.from_dict({"rollout_is_weights": found.weights})
    metrics = {_name_in_verl(name): value for name, value in found.metrics.items()}
    return weights, mask, metrics | {PREFIX + name: x for name, x in veto.items()}


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Measure the distance of the two policies.

    Raises:
        ValueError: if nothing is trained.
    """
    if not response_mask.any():
        raise ValueError("response_mask keeps no token")
    if rollout_log_prob is None:
        nan = torch.full_like(old_log_prob, math.nan)
        both = correction.compute_offpolicy_metrics(old_log_prob, nan, response_mask)
        return {name: both[name] for name in ("training_ppl", "training_log_ppl")}
    return correction.compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)


def _name_in_verl(name: str) -> str:
    """Remove the test's name from a metric: 0.6.1 has one test."""
    for test in _TESTS.values():
        name = name.replace(f"rollout_rs_{test}_", "rollout_rs_")
    return name


def _veto(
    log_ratio: Tensor, mask: Tensor, threshold: float | None
) -> tuple[Tensor, dict[str, float]]:
    """Reject sequences in which a token's ratio is below a threshold; return what is kept."""
    if threshold is not None and threshold <= 0:
        raise ValueError(f"rollout_token_veto_threshold is {threshold}, not positive")
    least = -math.inf if threshold is None else math.log(threshold)
    low = (log_ratio < least) & mask
    vetoed = low.any(-1, keepdim=True)
    metrics = {
        "rollout_is_veto_fraction": float(vetoed.double().mean()),
        "rollout_is_catastrophic_token_fraction": float(low[mask].double().mean()),
    }
    return ~vetoed, metrics
