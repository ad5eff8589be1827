"""Settings of the scoring that cannot hold together."""

from collections import Counter
from collections.abc import Iterator

from agentrl.config.dead_scoring_keys import may_use
from agentrl.config.problems import Problem
from agentrl.config.schema.reward import (
    BUNDLED_SCORERS,
    TAKEN_NAMES,
    RewardConfig,
    RewardFunctionConfig,
)
from agentrl.config.schema.run import RunConfig
from agentrl.errors import did_you_mean

_FUNCTIONS = "reward.functions"
_CUSTOM = "reward.custom_reward_function"
_OF_JUDGE = ("base_url", "model")


def find_reward_problems(config: RunConfig) -> Iterator[Problem]:
    """Find reward functions that cannot be told apart or found, or that nobody can call."""
    reward = config.reward
    if reward.functions:
        yield from _function_problems(reward)
    if reward.manager == "batch" and (reward.functions or reward.custom_reward_function is None):
        told = "is batch, whose scorer gets lists, and every bundled one scores one answer"
        yield Problem("reward.manager", told, f"{_CUSTOM}, or naive or prime")
    sandbox = reward.sandbox
    if sandbox.provider == "subprocess" and not sandbox.trusted and may_use(config, "code"):
        told = "is false, and the provider subprocess keeps nothing secret from the code it runs"
        yield Problem("reward.sandbox.trusted", told, "true, or another reward.sandbox.provider")


def _function_problems(reward: RewardConfig) -> Iterator[Problem]:
    if reward.custom_reward_function is not None:
        told = f"is set beside {_CUSTOM}"
        yield Problem(_FUNCTIONS, told, f"one of the two: what {_CUSTOM} says may stand in it")
    counts = Counter(function.name for function in reward.functions)
    for name, count in counts.items():
        if count > 1:
            yield Problem(_FUNCTIONS, f"has {count} functions named {name!r}", "a name for each")
    if all(function.weight == 0 for function in reward.functions):
        yield Problem(_FUNCTIONS, "has only weights of 0, so every reward is 0", "one that is not")
    for place, function in enumerate(reward.functions):
        yield from _name_problems(f"{_FUNCTIONS}[{place}]", function)
        yield from _judge_problems(f"{_FUNCTIONS}[{place}]", function)


def _judge_problems(key: str, function: RewardFunctionConfig) -> Iterator[Problem]:
    if function.name == "judge" and function.path is None:
        for name in (name for name in _OF_JUDGE if name not in function.reward_kwargs):
            told = "is missing, and the judge is a model behind an address"
            yield Problem(f"{key}.reward_kwargs.{name}", told, "a value")


def _name_problems(key: str, function: RewardFunctionConfig) -> Iterator[Problem]:
    if function.name in TAKEN_NAMES:
        told = f"{function.name!r} is what agentrl calls another part of the reward"
        yield Problem(f"{key}.name", told, "another name")
    elif function.path is None and function.name not in BUNDLED_SCORERS:
        guess = did_you_mean(function.name, BUNDLED_SCORERS)
        known = ", ".join(BUNDLED_SCORERS)
        told = f"{function.name!r} is no bundled scorer, and there is no path{guess}"
        yield Problem(f"{key}.name", told, f"one of {known}, or a path")
    if function.path is None and function.function != "compute_score":
        told = f"is {function.function!r}, and without a path there is nothing to find it in"
        yield Problem(f"{key}.function", told, "a path")
