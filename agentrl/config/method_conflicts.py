"""Settings of credit and update that cannot hold together."""

from collections import Counter
from collections.abc import Callable, Iterator

from agentrl.config.method_keys import GROUP_ESTIMATORS, INPUTS_NOT_MADE, READ_SQUARES
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
from agentrl.errors import ConfigError

_MOST_OF_A_STEP = 0.2
"""How far one batch of as many sequences as the horizon moves an adaptive weight at most."""
_BYPASS = "bypass_mode"


def find_group_of_one(config: RunConfig) -> Iterator[Problem]:
    """Find an estimator that compares the samples of a group, where there is one."""
    name = config.algorithm.adv_estimator
    if name in GROUP_ESTIMATORS and config.rollout.n == 1:
        told = f"is 1, and algorithm.adv_estimator {name} trains on nothing in a group of one"
        yield Problem("rollout.n", told, "at least 2")
    elif config.algorithm.filter_groups.enable and config.rollout.n == 1:
        told = "is 1, and algorithm.filter_groups finds no signal in a group of one"
        yield Problem("rollout.n", told, "at least 2")


def find_overlong_buffer(config: RunConfig) -> Iterator[Problem]:
    """Find a buffer of no tokens, or one that is longer than a response."""
    buffer, budget = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= budget:
        told = f"is {buffer.len}, and data.max_response_length is {budget}"
        yield Problem("reward.overlong_buffer.len", told, f"1 to {budget} tokens")


def find_missing_inputs(config: RunConfig) -> Iterator[Problem]:
    """Find an estimator without what it is computed from."""
    algorithm = config.algorithm
    if lacking := INPUTS_NOT_MADE.get(algorithm.adv_estimator):
        told = f"is {algorithm.adv_estimator}, which needs {lacking}"
        yield Problem("algorithm.adv_estimator", told, "another estimator, such as grpo")
    bypasses = algorithm.rollout_correction.effective.bypass_mode
    if bypasses and algorithm.adv_estimator in READ_SQUARES:
        told = (
            f"is {algorithm.adv_estimator}, which needs sum_pi_squared, and under "
            f"{SECTION}.{_BYPASS} there is no pass that gives it"
        )
        yield Problem("algorithm.adv_estimator", told, "one of the two")
    if not algorithm.adv_estimator.startswith("gdpo"):
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        told = "is empty, and gdpo has nothing to compare"
        yield Problem("algorithm.gdpo_reward_keys", told, "keys of the scorer's dict")
    for key, count in Counter(keys).items():
        if count > 1:
            told = f"names {key!r} {count} times, so that it would count {count} times"
            expected = "each key once, its share in algorithm.gdpo_reward_weights"
            yield Problem("algorithm.gdpo_reward_keys", told, expected)
    if weights and len(weights) != len(keys):
        told = f"{len(weights)} weights for {len(keys)} rewards"
        yield Problem("algorithm.gdpo_reward_weights", told, "one for each of gdpo_reward_keys")


def find_negative_scores(config: RunConfig) -> Iterator[Problem]:
    """Find what makes scores negative, under an estimator that divides by a group's mean."""
    if config.algorithm.adv_estimator != "maxrl":
        return
    told = "is true, and algorithm.adv_estimator maxrl takes no score below 0"
    expected = "false, or another estimator"
    if config.algorithm.use_kl_in_reward:
        use_kl_loss = "false (actor.use_kl_loss has the KL in the loss), or another estimator"
        yield Problem("algorithm.use_kl_in_reward", told, use_kl_loss)
    buffer = config.reward.overlong_buffer
    if buffer.enable and buffer.penalty_factor and config.reward.weights.trajectory:
        yield Problem("reward.overlong_buffer.enable", told, expected)
    if penalty := config.reward.length_penalty:
        told = f"is {penalty:g}, and algorithm.adv_estimator maxrl takes no score below 0"
        yield Problem("reward.length_penalty", told, "0, or another estimator")


def find_wild_kl_weight(config: RunConfig) -> Iterator[Problem]:
    """Find an adaptive weight that stays 0, or that one batch could turn negative."""
    control = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward or control.type == "fixed":
        return
    if control.kl_coef == 0:
        told = "is 0, and algorithm.kl_ctrl.type adaptive multiplies it: it stays 0"
        yield Problem("algorithm.kl_ctrl.kl_coef", told, "a positive number")
    sequences = config.data.train_batch_size * config.rollout.n
    if _MOST_OF_A_STEP * sequences >= control.horizon:
        told = f"{control.horizon} is too short for batches of {sequences} sequences: one could "
        expected = f"more than {_MOST_OF_A_STEP * sequences:g}"
        key = "algorithm.kl_ctrl.horizon"
        yield Problem(key, f"{told}turn the weight of the KL to 0 or below", expected)


def find_correction_problems(config: RunConfig) -> Iterator[Problem]:
    """Find what the rollout's correction cannot mean."""
    correction = config.algorithm.rollout_correction
    yield from _beside_preset(correction)
    yield from _thresholds(correction.effective)
    yield from _bypass(config, correction.effective)
    active = correction.effective.bypass_mode or correction.is_active
    if active and config.rollout.engine.name == "scripted":
        told = "corrects by the engine's log-probabilities, and a script has none"
        yield Problem(SECTION, told, "another rollout.engine.name, or no correction")


def _beside_preset(correction: RolloutCorrectionConfig) -> Iterator[Problem]:
    """A preset is a method: a key that makes it another one contradicts it."""
    if correction.preset is None:
        return
    preset = PRESETS[correction.preset]
    for name in sorted(correction.model_fields_set - {"preset", *TUNABLE}):
        default = RolloutCorrectionConfig.model_fields[name].default
        given, meant = getattr(correction, name), preset.get(name, default)
        if given != meant:
            told = f"is {given}, and preset {correction.preset} means {meant}"
            yield Problem(f"{SECTION}.{name}", told, "one of the two")


def _thresholds(correction: RolloutCorrectionConfig) -> Iterator[Problem]:
    def read_weights() -> None:
        if correction.rollout_is is not None:
            parse_is_threshold(correction.rollout_is_threshold)

    def read_tests() -> None:
        if correction.rollout_rs is not None:
            parse_rejections(correction.rollout_rs, correction.rollout_rs_threshold)

    for read in (read_weights, read_tests):
        if problem := _problem_of(read):
            yield problem


def _problem_of(read: Callable[[], None]) -> Problem | None:
    try:
        read()
    except ConfigError as error:
        found = {name: str(error.details.get(name, "")) for name in ("key", "expected")}
        return Problem(found["key"] or SECTION, str(error.args[0]), found["expected"] or None)
    return None


def _bypass(config: RunConfig, correction: RolloutCorrectionConfig) -> Iterator[Problem]:
    loss = config.actor.policy_loss
    if "rollout_correction" in loss.model_fields_set:
        told = "is no key of a run: the loss of bypass_mode is given the algorithm's"
        yield Problem("actor.policy_loss.rollout_correction", told, SECTION)
    if not correction.bypass_mode:
        if loss.loss_mode == _BYPASS:
            told = f"is {_BYPASS}, and {SECTION}.{_BYPASS} is false"
            yield Problem("actor.policy_loss.loss_mode", told, f"{SECTION}.{_BYPASS}=true")
        return
    if "loss_mode" in loss.model_fields_set and loss.loss_mode not in (_BYPASS, "vanilla"):
        told = f"is {loss.loss_mode}, and {SECTION}.{_BYPASS} has a loss of its own ({SECTION}."
        yield Problem("actor.policy_loss.loss_mode", f"{told}loss_type)", "one of the two")
    for key in ("rollout_is", "rollout_rs"):
        if "turn" in str(getattr(correction, key)):
            told = f"is {getattr(correction, key)}, and the loss of {_BYPASS} knows no turns"
            yield Problem(f"{SECTION}.{key}", told, "tokens or sequences")
    if correction.rollout_is_batch_normalize:
        told = f"is true, and under {_BYPASS} weights are made in each micro-batch"
        yield Problem(f"{SECTION}.rollout_is_batch_normalize", told, "false")
