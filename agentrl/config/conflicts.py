"""Find settings that conflict with each other, before any model loads.

Each check takes the configuration and yields what is wrong. The purpose of the run file decides
which checks run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from agentrl.config.dead_keys import may_use, set_keys
from agentrl.config.method_conflicts import (
    find_correction_problems,
    find_estimator_problems,
    find_kl_problems,
)
from agentrl.config.problems import Problem
from agentrl.config.schema.reward import (
    BUNDLED_SCORERS,
    TAKEN_NAMES,
    RewardConfig,
    RewardFunctionConfig,
)
from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.training import UpdateConfig
from agentrl.config.tables import has_no_critic
from agentrl.errors import did_you_mean

Check = Callable[[RunConfig], Iterator[Problem]]
_FUNCTIONS = "reward.functions"
BY_ROW = frozenset(
    {
        *("gspo", "luspo", "geo_mean", "geo_mean_verl", "vespo", "bypass_mode"),
        *("clip_cov_verl", "kl_cov_verl"),
    }
)
"""Bundled losses of which a token's loss depends on the other tokens of its row, or on the rows of
its micro-batch."""
_CUSTOM = "reward.custom_reward_function"


class Purpose(StrEnum):
    """What a run file is read for, which decides what it must say."""

    TRAIN = "train"
    """Training; or only validation, if `trainer.val_only` says so."""
    ROLLOUT = "rollout"
    """Rolling out some prompts and showing them: no batches, no update."""
    SFT = "sft"
    """Only the supervised warm-up."""


def find_conflicts(config: RunConfig, *, purpose: Purpose = Purpose.TRAIN) -> list[Problem]:
    """Find all settings that conflict.

    Args:
        config: A run file with valid single keys.
        purpose: What the run file is read for.
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
        reason = "is not set, and trainer.resume_mode is resume_path"
        yield Problem("trainer.resume_from_path", reason, "a checkpoint's folder")


def _steps(config: RunConfig) -> Iterator[Problem]:
    for key, value in (
        ("test_freq", config.trainer.test_freq),
        ("save_freq", config.trainer.save_freq),
    ):
        if value == 0:
            yield Problem(f"trainer.{key}", "0 is no interval", "a number of steps, or -1")
    batch = config.data.train_batch_size
    for role, update in _updates(config):
        mini = update.ppo_mini_batch_size
        if mini is not None and batch % mini:
            reason = f"{mini} prompts do not divide data.train_batch_size, {batch}"
            yield Problem(f"{role}.ppo_mini_batch_size", reason, f"a divisor of {batch}, or null")


def _updates(config: RunConfig) -> Iterator[tuple[str, UpdateConfig]]:
    """Iterate over the sections of the updates that may run."""
    yield "actor", config.actor
    if not has_no_critic(config):
        yield "critic", config.critic


def _lora(config: RunConfig) -> Iterator[Problem]:
    if config.model.has_lora and config.actor.optim.name == "muon":
        reason = "is muon, which makes an update of full rank; LoRA trains factors of low rank"
        yield Problem("actor.optim.name", reason, "adamw")


def _weights(config: RunConfig) -> Iterator[Problem]:
    reward = config.reward
    of_model = reward.model.weight if reward.model else 0
    extra = (reward.tool_call_bonus, reward.interaction_bonus, reward.length_penalty, of_model)
    if not any((*reward.weights.model_dump().values(), *extra)):
        yield Problem("reward.weights", "are all 0, so every reward is 0", "one that is not")
    buffer, budget = reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= budget:
        reason = f"is {buffer.len}, and data.max_response_length is {budget}"
        yield Problem("reward.overlong_buffer.len", reason, f"1 to {budget} tokens")


def _packing(config: RunConfig) -> Iterator[Problem]:
    longest = longest_sequence(config)
    for role, update in _updates(config):
        packed, num_ranks = update.ppo_max_token_len_per_gpu, update.ulysses_sequence_parallel_size
        if packed is not None and longest > packed * num_ranks:
            tokens = f"{packed} tokens"
            tokens += f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
            reason = f"a micro-batch of {tokens} cannot hold one sequence of {_sum(config)}"
            key = f"{role}.ppo_max_token_len_per_gpu"
            yield Problem(key, reason, f">= {-(-longest // num_ranks)}")


def _lengths(config: RunConfig) -> Iterator[Problem]:
    longest, limit = longest_sequence(config), config.rollout.max_model_len
    if limit is not None and longest > limit:
        reason = f"{limit} tokens cannot hold {_sum(config)}"
        yield Problem("rollout.max_model_len", reason, f">= {longest}")
    tiny = config.prepare.tiny_policy
    if tiny is not None and longest > tiny.max_position_embeddings:
        reason = f"{tiny.max_position_embeddings} positions cannot hold {_sum(config)}"
        yield Problem("prepare.tiny_policy.max_position_embeddings", reason, f">= {longest}")


def _compaction(config: RunConfig) -> Iterator[Problem]:
    compaction = config.rollout.multi_turn.compaction
    if compaction is None:
        return
    key, longest = "rollout.multi_turn.compaction", longest_sequence(config)
    needed = compaction.trigger_tokens + compaction.max_summary_tokens
    if needed >= longest:
        reason = (
            f"{compaction.trigger_tokens} and {compaction.max_summary_tokens} tokens of a summary "
            f"do not fit into {_sum(config)}"
        )
        expected = f"less than {max(1, longest - compaction.max_summary_tokens)}"
        yield Problem(f"{key}.trigger_tokens", reason, expected)
    loss = config.actor.policy_loss.loss_mode
    if loss in BY_ROW and config.algorithm.segment_credit == "trajectory":
        reason = f"is {loss}, which depends on rows as a whole, and {key} makes several of one"
        expected = "a loss of single tokens, or algorithm.segment_credit: final"
        yield Problem("actor.policy_loss.loss_mode", reason, expected)


def _sum(config: RunConfig) -> str:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    return (
        f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = "
        f"{prompt + response} tokens"
    )


def _budgets(config: RunConfig) -> Iterator[Problem]:
    """Find a budget of a part that exceeds the budget of the whole."""
    turns, timeout = config.rollout.multi_turn, config.rollout.request_timeout_s
    tokens = ("data.max_response_length", config.data.max_response_length, " tokens")
    seconds = ("rollout.request_timeout_s", timeout, " s")
    given = set(set_keys(config))
    for name, part, (whole_key, whole, unit) in (
        ("max_tokens_per_turn", turns.max_tokens_per_turn, tokens),
        ("max_tool_response_length", turns.max_tool_response_length, tokens),
        ("tool_timeout_s", turns.tool_timeout_s, seconds),
        ("interaction_timeout_s", turns.interaction_timeout_s, seconds),
    ):
        key = f"rollout.multi_turn.{name}"
        if key in given and part is not None and whole is not None and part > whole:
            reason = f"{part:g}{unit} are more than {whole_key}, {whole:g}"
            yield Problem(key, reason, f"at most {whole:g}")


def _pools(config: RunConfig) -> Iterator[Problem]:
    """Find pools that do not fit the run. Each reserves machines, so none may be without work."""
    pools, num_workers = config.cluster.pools, config.rollout.num_workers
    if not pools:
        return
    roles = {role for pool in pools for role in pool.roles}
    if "train" not in roles:
        yield Problem("cluster.pools", "no pool has the role train", "a pool for training ranks")
    if "rollout" not in roles and num_workers is not None:
        reason = f"is {num_workers}, and no pool of cluster.pools has the role rollout"
        yield Problem("rollout.num_workers", reason, "a pool with the role rollout, or null")
    idle: dict[str, str] = {}
    if num_workers is None:
        idle["rollout"] = "rollout.num_workers is null"
    if config.rollout.engine.name != "sglang_server":
        name = config.rollout.engine.name
        idle["engine"] = f"rollout.engine.name is {name}, which runs in the training ranks"
    elif not config.has_own_servers:
        idle["engine"] = "rollout.engine.sglang_server.addresses has servers that run elsewhere"
    for index, pool in enumerate(pools):
        key = f"cluster.pools[{index}]"
        if "train" in pool.roles and not pool.devices_per_node:
            reason = f"is 0, and the pool {pool.name} trains"
            yield Problem(f"{key}.devices_per_node", reason, "at least 1")
        if idle.keys() >= set(pool.roles):
            why = ", and ".join(idle[role] for role in pool.roles)
            reason = f"nothing runs in the pool {pool.name}: {why}"
            yield Problem(f"{key}.roles", reason, "no such pool, or work for it")


def _own_servers(config: RunConfig) -> Iterator[Problem]:
    tp_size = config.rollout.engine.sglang.tp_size
    pools = [pool for pool in config.pools if "engine" in pool.roles]
    if not any(pool.devices_per_node >= tp_size for pool in pools):
        yield Problem(
            "cluster.pools",
            f"no pool has the role engine and {tp_size} devices on a node",
            "a pool for the SGLang servers, or addresses in rollout.engine.sglang_server.addresses",
        )
    for pool in pools:
        if pool.devices_per_node % tp_size:
            yield Problem(
                "rollout.engine.sglang.tp_size",
                f"{tp_size} does not divide the {pool.devices_per_node} devices of a node of the "
                f"pool {pool.name}",
                "a divisor: a server uses devices of one node",
            )


def _engine(config: RunConfig) -> Iterator[Problem]:
    engine, rollout = config.rollout.engine, config.rollout
    if engine.name == "scripted" and not engine.scripted.answers:
        yield Problem("rollout.engine.scripted.answers", "is empty", "at least one answer")
    if engine.name.startswith("sglang") and rollout.deterministic:
        reason = f"is true, and the engine {engine.name} chooses itself which requests run together"
        yield Problem("rollout.deterministic", reason, "rollout.engine.name=transformers")
    if config.has_own_servers:
        yield from _own_servers(config)
    elif engine.name == "sglang_server" and not engine.sglang_server.addresses:
        expected = "the addresses that `agentrl serve` prints, or a run on Ray (cluster.pools)"
        yield Problem("rollout.engine.sglang_server.addresses", "is empty", expected)
    for key, top_k in (("top_k", rollout.top_k), ("val_kwargs.top_k", rollout.val_kwargs.top_k)):
        if top_k == 0 or top_k < -1:
            yield Problem(f"rollout.{key}", f"{top_k} keeps no token", "at least 1, or -1: all")


def _tiny_policy(config: RunConfig) -> Iterator[Problem]:
    tiny = config.prepare.tiny_policy
    if tiny is None:
        return
    for key, part, whole_key, whole in (
        ("num_heads", tiny.num_heads, "hidden_size", tiny.hidden_size),
        ("num_kv_heads", tiny.num_kv_heads, "num_heads", tiny.num_heads),
    ):
        if part < 1 or whole % part:
            reason = f"{part} does not divide prepare.tiny_policy.{whole_key}, {whole}"
            yield Problem(f"prepare.tiny_policy.{key}", reason, f"a divisor of {whole}")


def find_scoring_problems(config: RunConfig) -> Iterator[Problem]:
    """Find reward functions that are ambiguous, unknown, or impossible to call."""
    reward, sandbox = config.reward, config.reward.sandbox
    if reward.functions:
        yield from _functions(reward)
    if reward.manager == "batch" and (reward.functions or reward.custom_reward_function is None):
        reason = (
            "is batch, which passes lists to its scorer, and every bundled scorer scores one answer"
        )
        yield Problem("reward.manager", reason, f"{_CUSTOM}, or naive or prime")
    if reward.model and reward.model.engine == "sglang" and not reward.model.addresses:
        reason = "is empty, and reward.model.engine is sglang"
        yield Problem("reward.model.addresses", reason, "addresses of servers of the reward model")
    if sandbox.provider == "subprocess" and not sandbox.trusted and may_use(config, "code"):
        reason = "is false, and the provider subprocess hides nothing from the code that it runs"
        yield Problem("reward.sandbox.trusted", reason, "true, or another reward.sandbox.provider")


def _functions(reward: RewardConfig) -> Iterator[Problem]:
    if reward.custom_reward_function is not None:
        expected = f"one of the two; {_CUSTOM} may become one of the functions"
        yield Problem(_FUNCTIONS, f"is set together with {_CUSTOM}", expected)
    for name, count in Counter(function.name for function in reward.functions).items():
        if count > 1:
            yield Problem(_FUNCTIONS, f"has {count} functions named {name!r}", "a name for each")
    if all(function.weight == 0 for function in reward.functions):
        yield Problem(_FUNCTIONS, "has only weights of 0, so every reward is 0", "one that is not")
    for index, function in enumerate(reward.functions):
        yield from _function(f"{_FUNCTIONS}[{index}]", function)


def _function(key: str, function: RewardFunctionConfig) -> Iterator[Problem]:
    if function.name in TAKEN_NAMES:
        reason = f"{function.name!r} is the name of another part of the reward"
        yield Problem(f"{key}.name", reason, "another name")
    elif function.path is None and function.name not in BUNDLED_SCORERS:
        guess = did_you_mean(function.name, BUNDLED_SCORERS)
        reason = f"{function.name!r} is no bundled scorer, and there is no path{guess}"
        yield Problem(f"{key}.name", reason, f"one of {', '.join(BUNDLED_SCORERS)}, or a path")
    if function.path is None and function.function != "compute_score":
        reason = f"is {function.function!r}, and there is no path to the module that has it"
        yield Problem(f"{key}.function", reason, "a path")
    if function.path is None and function.name == "judge":
        for name in ("base_url", "model"):
            if name not in function.reward_kwargs:
                reason = "is missing, and the judge needs a model at an address"
                yield Problem(f"{key}.reward_kwargs.{name}", reason, "a value")


_GENERATION: tuple[Check, ...] = (
    _lengths,
    _compaction,
    _budgets,
    _engine,
    _tiny_policy,
    find_scoring_problems,
)
VALIDATION_CHECKS: tuple[Check, ...] = (_val_files, _resume, _pools, *_GENERATION)
"""The checks under `trainer.val_only`."""
CHECKS: Mapping[Purpose, tuple[Check, ...]] = {
    Purpose.TRAIN: (
        _train_files, _resume, _steps, find_estimator_problems, find_kl_problems,
        find_correction_problems, _weights, _packing, _lora, _pools, *_GENERATION,
    ),
    Purpose.ROLLOUT: _GENERATION,
    Purpose.SFT: (_tiny_policy,),
}  # fmt: skip
"""The checks for each purpose, in the order in which their problems are listed."""
