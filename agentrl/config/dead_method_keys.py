"""Keys of credit and update that change nothing with the methods that are chosen."""

from collections.abc import Callable, Iterator, Mapping

from agentrl.config.key_notes import DeadKeyRule
from agentrl.config.method_keys import (
    FIXED_AGGREGATION,
    KEYS_OF_ESTIMATOR,
    KEYS_OF_LOSS,
    chosen_loss,
    is_gdpo,
)
from agentrl.config.schema.correction import RolloutCorrectionConfig
from agentrl.config.schema.run import RunConfig

_Correction = Callable[[RolloutCorrectionConfig], bool]


def _method_rules(
    keys_of: Mapping[str, frozenset[str]], chosen: Callable[[RunConfig], str], kind: str
) -> Iterator[DeadKeyRule]:
    every = frozenset[str]().union(*keys_of.values())
    for name, read in keys_of.items():
        yield DeadKeyRule(
            tuple(sorted(every - read)),
            lambda c, name=name: chosen(c) == name,
            f"the {kind} {name} does not read it",
        )


def _fixed_aggregation() -> Iterator[DeadKeyRule]:
    for name, mode in FIXED_AGGREGATION.items():
        yield DeadKeyRule(
            ("actor.loss_agg_mode",),
            lambda c, name=name: chosen_loss(c) == name,
            f"{mode} is a part of the policy loss {name}",
        )


def _correction_rule(leaves: tuple[str, ...], applies: _Correction, reason: str) -> DeadKeyRule:
    return DeadKeyRule(
        tuple(f"algorithm.rollout_correction.{leaf}" for leaf in leaves),
        lambda c: applies(c.algorithm.rollout_correction.effective),
        reason,
    )


def _has_two_bounds(correction: RolloutCorrectionConfig) -> bool:
    return "_" in str(correction.rollout_is_threshold)


CORRECTION_RULES = (
    _correction_rule(
        ("rollout_is", "rollout_is_threshold", "rollout_is_mode", "rollout_is_batch_normalize"),
        lambda r: r.bypass_mode and r.loss_type == "ppo_clip",
        "under bypass_mode the clip of ppo_clip bounds the ratio to the engine: there is no weight",
    ),
    _correction_rule(
        ("rollout_is_threshold", "rollout_is_mode", "rollout_is_batch_normalize"),
        lambda r: r.rollout_is is None,
        "algorithm.rollout_correction.rollout_is is null, so there are no weights",
    ),
    _correction_rule(
        ("rollout_is_mode",),
        _has_two_bounds,
        "rollout_is_threshold has two bounds, and weights outside them are 0",
    ),
    _correction_rule(
        ("advantages",),
        lambda r: r.bypass_mode,
        "under bypass_mode the loss rejects, behind the advantages",
    ),
    _correction_rule(
        ("rollout_rs_threshold", "advantages"),
        lambda r: r.rollout_rs is None,
        "algorithm.rollout_correction.rollout_rs is null, so nothing is rejected",
    ),
    _correction_rule(
        ("loss_type",),
        lambda r: not r.bypass_mode,
        "algorithm.rollout_correction.bypass_mode is false, so actor.policy_loss is the loss",
    ),
)
KL_RULES = (
    DeadKeyRule(
        ("actor.kl_loss_coef", "actor.kl_loss_type"),
        lambda c: not c.actor.use_kl_loss,
        "actor.use_kl_loss is false, so the loss has no KL",
    ),
    DeadKeyRule(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
        lambda c: not c.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward is false, so no KL is taken off the rewards",
    ),
    DeadKeyRule(
        ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"),
        lambda c: c.algorithm.kl_ctrl.type == "fixed",
        "algorithm.kl_ctrl.type is fixed",
    ),
    DeadKeyRule(
        ("ref.path",),
        lambda c: not (c.actor.use_kl_loss or c.algorithm.use_kl_in_reward),
        "actor.use_kl_loss and algorithm.use_kl_in_reward are false, so there is no reference",
    ),
)


GDPO_RULES = (
    DeadKeyRule(
        ("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
        is_gdpo,
        "gdpo compares the rewards of gdpo_reward_keys, from which no KL is taken",
    ),
    DeadKeyRule(
        ("ref.path",),
        lambda c: is_gdpo(c) and not c.actor.use_kl_loss,
        "the KL to the reference changes no advantage of gdpo",
    ),
)
METHOD_RULES: tuple[DeadKeyRule, ...] = (
    *_method_rules(KEYS_OF_LOSS, chosen_loss, "policy loss"),
    *_method_rules(KEYS_OF_ESTIMATOR, lambda c: c.algorithm.adv_estimator, "estimator"),
    *_fixed_aggregation(),
    DeadKeyRule(
        ("actor.clip_ratio_low", "actor.clip_ratio_high", "actor.clip_ratio", "actor.clip_ratio_c"),
        lambda c: (
            chosen_loss(c) == "bypass_mode"
            and c.algorithm.rollout_correction.effective.loss_type == "reinforce"
        ),
        "algorithm.rollout_correction.loss_type is reinforce, which clips nothing",
    ),
    DeadKeyRule(
        ("actor.clip_ratio",),
        # What a loss of the user's own reads is not known.
        lambda c: (
            chosen_loss(c) in KEYS_OF_LOSS
            and c.actor.clip_ratio_low is not None
            and c.actor.clip_ratio_high is not None
        ),
        "actor.clip_ratio_low and actor.clip_ratio_high are both set",
    ),
    DeadKeyRule(
        ("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"),
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable is false",
    ),
    *KL_RULES,
    *GDPO_RULES,
    *CORRECTION_RULES,
)
"""Every rule of a method; the first that covers a key gives its reason."""
