"""Find settings of estimator, policy loss and correction that conflict with each other."""

from collections import Counter
from collections.abc import Iterator

from agentrl.config.problems import Problem
from agentrl.config.schema.correction import (
    PRESETS,
    SECTION,
    TUNABLE,
    RolloutCorrectionConfig,
    parse_is_threshold,
    parse_rejections,
)
from agentrl.config.schema.run import RunConfig
from agentrl.config.tables import EstimatorFacts, estimator_facts
from agentrl.errors import ConfigError

_MAX_KL_STEP = 0.2
"""The largest relative change of an adaptive KL weight, per sequence of the horizon."""
_BYPASS = "bypass_mode"
_ESTIMATOR = "algorithm.adv_estimator"


def find_estimator_problems(config: RunConfig) -> Iterator[Problem]:
    """Find an estimator without its inputs, or with inputs that it cannot use."""
    facts, name = estimator_facts(config) or EstimatorFacts(), config.algorithm.adv_estimator
    if config.rollout.n == 1 and facts.compares_groups:
        reason = f"is 1, and {_ESTIMATOR} {name} trains on nothing in a group of one"
        yield Problem("rollout.n", reason, "at least 2")
    elif config.rollout.n == 1 and config.algorithm.filter_groups.enable:
        reason = "is 1, and algorithm.filter_groups finds no signal in a group of one"
        yield Problem("rollout.n", reason, "at least 2")
    if facts.needs_squares and config.algorithm.rollout_correction.effective.bypass_mode:
        reason = (
            f"is {name}, which needs sum_pi_squared, and under {SECTION}.{_BYPASS} no pass "
            "computes it"
        )
        yield Problem(_ESTIMATOR, reason, "one of the two")
    if name.startswith("gdpo"):
        yield from _gdpo(config)
    if name == "maxrl":
        yield from _negative_scores(config)


def _gdpo(config: RunConfig) -> Iterator[Problem]:
    key = "algorithm.gdpo_reward_keys"
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if not keys:
        reason = "is empty, and gdpo has nothing to compare"
        yield Problem(key, reason, "keys of the scorer's dict")
    for name, count in Counter(keys).items():
        if count > 1:
            reason = f"names {name!r} {count} times, so that it would count {count} times"
            expected = "each key once, its share in algorithm.gdpo_reward_weights"
            yield Problem(key, reason, expected)
    if weights and len(weights) != len(keys):
        reason = f"{len(weights)} weights for {len(keys)} rewards"
        yield Problem("algorithm.gdpo_reward_weights", reason, "one for each of gdpo_reward_keys")


def _negative_scores(config: RunConfig) -> Iterator[Problem]:
    """Find what makes scores negative; maxrl divides by a group's mean."""
    reward, reason = config.reward, f"and {_ESTIMATOR} maxrl takes no score below 0"
    if config.algorithm.use_kl_in_reward:
        expected = "false (actor.use_kl_loss has the KL in the loss), or another estimator"
        yield Problem("algorithm.use_kl_in_reward", f"is true, {reason}", expected)
    buffer = reward.overlong_buffer
    if buffer.enable and buffer.penalty_factor and reward.weights.trajectory:
        expected = "false, or another estimator"
        yield Problem("reward.overlong_buffer.enable", f"is true, {reason}", expected)
    if penalty := reward.length_penalty:
        expected = "0, or another estimator"
        yield Problem("reward.length_penalty", f"is {penalty:g}, {reason}", expected)


def find_kl_problems(config: RunConfig) -> Iterator[Problem]:
    """Find an adaptive KL weight that stays 0, or that one batch could make negative."""
    control = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward or control.type == "fixed":
        return
    if control.kl_coef == 0:
        reason = "is 0, and algorithm.kl_ctrl.type adaptive multiplies it: it stays 0"
        yield Problem("algorithm.kl_ctrl.kl_coef", reason, "a positive number")
    sequences = config.data.train_batch_size * config.rollout.n
    least = _MAX_KL_STEP * sequences
    if least >= control.horizon:
        reason = (
            f"{control.horizon} is too short for batches of {sequences} sequences: one could "
            "change the weight of the KL to 0 or below"
        )
        yield Problem("algorithm.kl_ctrl.horizon", reason, f"more than {least:g}")


def find_correction_problems(config: RunConfig) -> Iterator[Problem]:
    """Find settings of the rollout's correction that have no meaning."""
    correction = config.algorithm.rollout_correction
    effective = correction.effective
    yield from _preset(correction)
    yield from _thresholds(effective)
    yield from _bypass(effective) if effective.bypass_mode else ()
    yield from _bypass_loss(config, effective.bypass_mode)
    active = effective.bypass_mode or correction.is_active
    if active and config.rollout.engine.name == "scripted":
        reason = "corrects by the engine's log-probabilities, and the scripted engine has none"
        yield Problem(SECTION, reason, "another rollout.engine.name, or no correction")


def _preset(correction: RolloutCorrectionConfig) -> Iterator[Problem]:
    """Find a key that changes the method which the preset names."""
    if correction.preset is None:
        return
    preset = PRESETS[correction.preset]
    for name in sorted(correction.model_fields_set - {"preset", *TUNABLE}):
        default = RolloutCorrectionConfig.model_fields[name].default
        given, meant = getattr(correction, name), preset.get(name, default)
        if given != meant:
            reason = f"is {given}, and preset {correction.preset} means {meant}"
            yield Problem(f"{SECTION}.{name}", reason, "one of the two")


def _thresholds(correction: RolloutCorrectionConfig) -> Iterator[Problem]:
    tests, bounds = correction.rollout_rs, correction.rollout_rs_threshold
    weights = correction.rollout_is
    for is_used, parse in (
        (weights is not None, lambda: parse_is_threshold(correction.rollout_is_threshold)),
        (tests is not None, lambda: parse_rejections(tests or "", bounds)),
    ):
        try:
            if is_used:
                parse()
        except ConfigError as error:
            key, expected = (error.details.get(name) for name in ("key", "expected"))
            yield Problem(str(key or SECTION), str(error.args[0]), str(expected or "") or None)


def _bypass_loss(config: RunConfig, bypasses: bool) -> Iterator[Problem]:
    loss, key = config.actor.policy_loss, "actor.policy_loss.loss_mode"
    if "rollout_correction" in loss.model_fields_set:
        reason = f"is no key of a run; the loss of {_BYPASS} reads {SECTION}"
        yield Problem("actor.policy_loss.rollout_correction", reason, SECTION)
    if not bypasses and loss.loss_mode == _BYPASS:
        reason = f"is {_BYPASS}, and {SECTION}.{_BYPASS} is false"
        yield Problem(key, reason, f"{SECTION}.{_BYPASS}=true")
    is_chosen = "loss_mode" in loss.model_fields_set
    if bypasses and is_chosen and loss.loss_mode not in (_BYPASS, "vanilla"):
        reason = f"is {loss.loss_mode}, and {SECTION}.{_BYPASS} has its own loss "
        yield Problem(key, f"{reason}({SECTION}.loss_type)", "one of the two")


def _bypass(correction: RolloutCorrectionConfig) -> Iterator[Problem]:
    for key in ("rollout_is", "rollout_rs"):
        if "turn" in str(getattr(correction, key)):
            reason = f"is {getattr(correction, key)}, and the loss of {_BYPASS} has no turns"
            yield Problem(f"{SECTION}.{key}", reason, "tokens or sequences")
    if correction.rollout_is_batch_normalize:
        reason = f"is true, and under {_BYPASS} each micro-batch computes its own weights"
        yield Problem(f"{SECTION}.rollout_is_batch_normalize", reason, "false")
