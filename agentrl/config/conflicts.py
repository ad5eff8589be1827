"""Settings that cannot hold together, told before any model loads.

Each check takes the configuration and yields what is wrong. Which checks are made depends on what
the run file is read for.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from agentrl.config.dead_keys import set_keys
from agentrl.config.dead_scoring_keys import may_use
from agentrl.config.method_conflicts import (
    find_correction_problems,
    find_group_of_one,
    find_missing_inputs,
    find_negative_scores,
    find_overlong_buffer,
    find_wild_kl_weight,
)
from agentrl.config.problems import Problem
from agentrl.config.schema.reward import (
    BUNDLED_SCORERS,
    TAKEN_NAMES,
    RewardConfig,
    RewardFunctionConfig,
)
from agentrl.config.schema.run import RunConfig
from agentrl.errors import did_you_mean

Check = Callable[[RunConfig], Iterator[Problem]]


class Purpose(StrEnum):
    """What a run file is read for, which decides what it must say."""

    TRAIN = "train"
    """Training, or validating alone where `trainer.val_only` says so."""
    ROLLOUT = "rollout"
    """Rolling out some prompts and showing them: no batches, no update."""
    SFT = "sft"
    """The supervised warm-up alone."""


def find_contradictions(config: RunConfig, *, purpose: Purpose = Purpose.TRAIN) -> list[Problem]:
    """Find every pair of settings that cannot both be meant.

    Args:
        config: A run file whose single keys are right.
        purpose: What is to be done with it.
    """
    trains = purpose is Purpose.TRAIN
    checks = VALIDATION_CHECKS if trains and config.trainer.val_only else CHECKS[purpose]
    return [problem for check in checks for problem in check(config)]


def longest_sequence(config: RunConfig) -> int:
    """Count the tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_length + config.data.max_response_length


def _val_files(config: RunConfig) -> Iterator[Problem]:
    if not config.data.val_files:
        yield Problem("data.val_files", "is empty, and trainer.val_only is true", "a file")


def _train_files(config: RunConfig) -> Iterator[Problem]:
    if not config.data.train_files:
        yield Problem("data.train_files", "is empty", "at least one file")


def _resume(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        told = "is not set, and trainer.resume_mode is resume_path"
        yield Problem("trainer.resume_from_path", told, "a checkpoint's folder")


def _intervals(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    for key, value in (("test_freq", trainer.test_freq), ("save_freq", trainer.save_freq)):
        if value == 0:
            yield Problem(f"trainer.{key}", "0 is no interval", "a number of steps, or -1")


def _batches(config: RunConfig) -> Iterator[Problem]:
    batch, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    if mini is not None and batch % mini:
        told = f"{mini} prompts do not divide data.train_batch_size, {batch}"
        yield Problem("actor.ppo_mini_batch_size", told, f"a divisor of {batch}, or null")


def _weights(config: RunConfig) -> Iterator[Problem]:
    reward = config.reward
    extra = (reward.tool_call_bonus, reward.interaction_bonus, reward.length_penalty)
    if not any((*reward.weights.model_dump().values(), *extra)):
        yield Problem("reward.weights", "are all 0, so every reward is 0", "one that is not")


def _packing(config: RunConfig) -> Iterator[Problem]:
    longest, told = longest_sequence(config), _sum_in_words(config)
    packed = config.actor.ppo_max_token_len_per_gpu
    if longest > packed:
        words = f"a micro-batch of {packed} tokens cannot hold one sequence of {told}"
        yield Problem("actor.ppo_max_token_len_per_gpu", words, f">= {longest}")


def _lengths(config: RunConfig) -> Iterator[Problem]:
    longest, told = longest_sequence(config), _sum_in_words(config)
    limit = config.rollout.max_model_len
    if limit is not None and longest > limit:
        yield Problem(
            "rollout.max_model_len", f"{limit} tokens cannot hold {told}", f">= {longest}"
        )
    tiny = config.prepare.tiny_policy
    if tiny is not None and longest > tiny.max_position_embeddings:
        words = f"{tiny.max_position_embeddings} positions cannot hold {told}"
        yield Problem("prepare.tiny_policy.max_position_embeddings", words, f">= {longest}")


def _budgets(config: RunConfig) -> Iterator[Problem]:
    response, multi_turn = config.data.max_response_length, config.rollout.multi_turn
    given = set(set_keys(config))
    budgets = {
        "rollout.multi_turn.max_tokens_per_turn": multi_turn.max_tokens_per_turn,
        "rollout.multi_turn.max_tool_response_length": multi_turn.max_tool_response_length,
    }
    for key, tokens in budgets.items():
        if key in given and tokens is not None and tokens > response:
            told = f"{tokens} tokens are more than data.max_response_length, {response}"
            yield Problem(key, told, f"at most {response}")
    timeout = config.rollout.request_timeout_s
    for name, seconds in (
        ("tool_timeout_s", multi_turn.tool_timeout_s),
        ("interaction_timeout_s", multi_turn.interaction_timeout_s),
    ):
        key = f"rollout.multi_turn.{name}"
        if key in given and timeout is not None and seconds > timeout:
            told = f"{seconds:g} s are more than rollout.request_timeout_s, {timeout:g}"
            yield Problem(key, told, f"at most {timeout:g}")


def _engine(config: RunConfig) -> Iterator[Problem]:
    engine = config.rollout.engine
    if engine.name == "scripted" and not engine.scripted.answers:
        yield Problem("rollout.engine.scripted.answers", "is empty", "at least one answer")
    if engine.name.startswith("sglang") and config.rollout.deterministic:
        told = f"is true, and the engine {engine.name} decides itself what runs beside what"
        yield Problem("rollout.deterministic", told, "rollout.engine.name=transformers")
    if engine.name == "sglang_server" and not engine.sglang_server.addresses:
        expected = "what `agentrl serve` prints"
        yield Problem("rollout.engine.sglang_server.addresses", "is empty", expected)
    for key, top_k in (
        ("", config.rollout.top_k),
        ("val_kwargs.", config.rollout.val_kwargs.top_k),
    ):
        if top_k == 0 or top_k < -1:
            yield Problem(
                f"rollout.{key}top_k", f"{top_k} keeps no token", "at least 1, or -1: all"
            )


def _tiny_policy(config: RunConfig) -> Iterator[Problem]:
    tiny = config.prepare.tiny_policy
    if tiny is None:
        return
    for key, part, whole_key, whole in (
        ("num_heads", tiny.num_heads, "hidden_size", tiny.hidden_size),
        ("num_kv_heads", tiny.num_kv_heads, "num_heads", tiny.num_heads),
    ):
        if part < 1 or whole % part:
            told = f"{part} does not divide prepare.tiny_policy.{whole_key}, {whole}"
            yield Problem(f"prepare.tiny_policy.{key}", told, f"a divisor of {whole}")


def _sum_in_words(config: RunConfig) -> str:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    return (
        f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = "
        f"{prompt + response} tokens"
    )


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


_GENERATION: tuple[Check, ...] = (
    _lengths, _budgets, _engine, _tiny_policy, find_reward_problems,
)  # fmt: skip
VALIDATION_CHECKS: tuple[Check, ...] = (_val_files, _resume, *_GENERATION)
"""What must hold under `trainer.val_only`."""
CHECKS: Mapping[Purpose, tuple[Check, ...]] = {
    Purpose.TRAIN: (
        _train_files, _resume, _intervals, _batches, find_group_of_one, find_missing_inputs,
        find_wild_kl_weight, find_negative_scores, find_correction_problems, find_overlong_buffer,
        _weights, _packing, *_GENERATION,
    ),
    Purpose.ROLLOUT: _GENERATION,
    Purpose.SFT: (_tiny_policy,),
}  # fmt: skip
"""What must hold for each purpose, in the order in which its problems are told."""
