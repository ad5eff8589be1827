"""Keys of the combined reward and of its placement that change nothing in this configuration."""

from agentrl.config.key_notes import DeadKeyRule
from agentrl.config.method_keys import SUM_ESTIMATORS, is_gdpo
from agentrl.config.schema.run import RunConfig

CALL_KEYS = ("reward.weights.tool_call", "reward.tool_call_bonus", "reward.max_bonus_calls")
"""Those that are nothing without tool calls."""
_SHAPING_KEYS = (
    *("reward.tool_call_bonus", "reward.max_bonus_calls", "reward.interaction_bonus"),
    "reward.length_penalty",
)
_PLACEMENT_KEYS = ("reward.placement", "reward.placement_decay")
CREDIT_KEYS = ("reward.weights.*", *_SHAPING_KEYS, *_PLACEMENT_KEYS)
"""All of them."""


def _reads_no_sum(config: RunConfig) -> bool:
    """Whether neither the advantages nor the choice of groups reads a sample's combined reward."""
    return is_gdpo(config) and not config.algorithm.filter_groups.enable


def _compares_alone(name: str, *keys: str) -> DeadKeyRule:
    """Under gdpo: what `reward_extra_info` has under a name that is not compared."""
    return DeadKeyRule(
        keys,
        lambda c: _reads_no_sum(c) and name not in c.algorithm.gdpo_reward_keys,
        f"{name} is none of algorithm.gdpo_reward_keys",
    )


CREDIT_RULES: tuple[DeadKeyRule, ...] = (
    DeadKeyRule(
        ("reward.overlong_buffer.len", "reward.overlong_buffer.penalty_factor"),
        lambda c: not c.reward.overlong_buffer.enable,
        "reward.overlong_buffer.enable is false",
    ),
    DeadKeyRule(
        ("reward.overlong_buffer.*",),
        lambda c: c.reward.weights.trajectory == 0,
        "reward.weights.trajectory is 0, and the punishment is a part of the trajectory's reward",
    ),
    DeadKeyRule(
        ("reward.max_bonus_calls",),
        lambda c: c.reward.tool_call_bonus == 0,
        "reward.tool_call_bonus is 0",
    ),
    DeadKeyRule(
        _PLACEMENT_KEYS,
        is_gdpo,
        "gdpo compares the rewards of gdpo_reward_keys, wherever the sum lands",
    ),
    DeadKeyRule(
        _PLACEMENT_KEYS,
        lambda c: c.algorithm.adv_estimator in SUM_ESTIMATORS,
        "algorithm.adv_estimator compares sums of rewards, wherever they land",
    ),
    DeadKeyRule(
        ("reward.placement_decay",),
        lambda c: c.reward.placement != "exponential_decay",
        "reward.placement is not exponential_decay",
    ),
    DeadKeyRule(
        ("reward.weights.*",),
        _reads_no_sum,
        "gdpo compares the rewards of gdpo_reward_keys; the combined one is a figure alone",
    ),
    _compares_alone("overlong_reward", "reward.overlong_buffer.*"),
    _compares_alone("tool_call_bonus", "reward.tool_call_bonus", "reward.max_bonus_calls"),
    _compares_alone("interaction_bonus", "reward.interaction_bonus"),
    _compares_alone("length_penalty", "reward.length_penalty"),
)
