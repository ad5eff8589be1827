"""Check a run before any model loads: conflicts, dead keys, biases."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from agentrl.config.conflicts import Purpose, find_conflicts, longest_sequence
from agentrl.config.dead_keys import DeadKey, KeyNote, find_dead_keys, set_keys, why_no_call
from agentrl.config.problems import Problem, raise_problems
from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.training import UpdateConfig
from agentrl.config.tables import estimator_facts, has_no_critic, is_gdpo


class Bias(KeyNote):
    """A setting that is allowed and makes the training differ from its formulas."""

    def __str__(self) -> str:
        return f"{self.key} biases the training: {self.reason}"


def check_config(
    config: RunConfig,
    *,
    world_size: int | None = 1,
    file: str | Path | None = None,
    purpose: Purpose = Purpose.TRAIN,
) -> list[KeyNote]:
    """Refuse conflicting settings, and list the notes for the user.

    Args:
        config: A run file with valid single keys.
        world_size: Ranks that share each batch; None: unknown.
        file: The run file, for the error.
        purpose: What the run file is read for.

    Returns:
        Dead keys, biases, tools that are never called, ranks without work and limits of
        determinism, to be printed before the run.

    Raises:
        ConfigError: with every conflict, a line for each.
    """
    problems = find_conflicts(config, purpose=purpose)
    if world_size is not None and purpose is Purpose.TRAIN:
        problems += find_rank_conflicts(config, world_size)
    if problems:
        raise_problems(problems, file)
    dead = find_dead_keys(config)
    silent = {key.key for key in dead}
    return [
        *dead,
        *(bias for bias in find_biases(config) if bias.key not in silent),
        *find_idle_tools(config),
        *([] if world_size is None else find_idle_ranks(config, world_size)),
        *find_limits_of_determinism(config),
    ]


def find_biases(config: RunConfig) -> list[Bias]:
    """Find the settings that are allowed and biased; without training there are none."""
    if config.trainer.val_only:
        return []
    cut = "log-probabilities are those of the full distribution, not of the one sampled from"
    kl = (
        f"the gradient of {config.actor.kl_loss_type} is not that of the KL; use k2, k3 or a "
        "straight-through form such as k1+"
    )
    early = (
        "rewards before a token are not counted in its return, though the token helped to earn them"
    )
    is_empty_kl = config.actor.use_kl_loss and config.actor.kl_loss_type in ("k1", "kl")
    found = (
        ("rollout.top_p", cut, config.rollout.top_p < 1),
        ("rollout.top_k", cut, config.rollout.top_k > 0),
        ("actor.kl_loss_type", kl, is_empty_kl),
        ("reward.placement", early, _pays_early(config)),
    )
    return [Bias(key, reason) for key, reason, is_biased in found if is_biased]


def _pays_early(config: RunConfig) -> bool:
    """Whether part of a reward comes before tokens that earned it, under returns-to-go."""
    facts, reward = estimator_facts(config), config.reward
    if facts is None or facts.rewards == "sum" or is_gdpo(config):
        return False
    of_trajectory = (reward.weights.trajectory, reward.weights.tool, reward.length_penalty)
    spreads = any(of_trajectory) or facts.rewards != "turns"
    return reward.placement != "last_token" and spreads


def find_idle_tools(config: RunConfig) -> list[KeyNote]:
    """Find tools that the policy is shown and that are never called."""
    reason = why_no_call(config)
    keys = [f"rollout.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path")]
    given = [key for key in set_keys(config) if key in keys] if reason else []
    return [KeyNote(key, f"the tools are shown and never called: {reason}") for key in given]


def find_limits_of_determinism(config: RunConfig) -> list[KeyNote]:
    """Find the settings that weaken the promise of `rollout.deterministic`."""
    if not config.rollout.deterministic:
        return []
    clock = "if it fires, the run is no longer exact to the last bit (rollout.deterministic)"
    cuda = "rollout.deterministic promises every bit only on a CPU; on CUDA it depends on kernels"
    found = (
        ("rollout.request_timeout_s", clock, config.rollout.request_timeout_s is not None),
        ("trainer.device", cuda, config.trainer.device == "cuda"),
    )
    return [KeyNote(key, reason) for key, reason, is_so in found if is_so]


def find_rank_conflicts(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Find groups that the ranks cannot be divided into, and engines that share devices."""
    sizes: dict[str, int] = {}
    for section, update in _updates(config).items():
        sequence, shard = update.ulysses_sequence_parallel_size, update.fsdp_config.fsdp_size
        sizes[f"{section}.ulysses_sequence_parallel_size"] = sequence
        # More than there are means all ranks.
        sizes[f"{section}.fsdp_config.fsdp_size"] = min(max(shard, 1), world_size)
    for key, size in sizes.items():
        if world_size % size:
            ranks = f"{world_size} rank{'s' * (world_size > 1)}"
            reason = f"is {size}, and the {ranks} of the run cannot be divided into such groups"
            yield Problem(key, reason, f"a divisor of {world_size}, or {size} ranks (torchrun)")
    engine = config.rollout.engine
    if world_size > 1 and engine.name in ("auto", "sglang") and engine.sglang.tp_size > 1:
        reason = f"is {engine.sglang.tp_size}, and each of {world_size} ranks has its own engine"
        expected = "1, or servers: rollout.engine.name=sglang_server"
        yield Problem("rollout.engine.sglang.tp_size", reason, expected)


def find_idle_ranks(config: RunConfig, world_size: int) -> list[KeyNote]:
    """Find ranks without work in an update, and keys that only more ranks would read."""
    found, given, num_prompts = list[KeyNote](), set(set_keys(config)), dict[str, int]()
    if world_size == 1 and (key := "trainer.collective_timeout_s") in given:
        found.append(DeadKey(key, "a run on one rank waits for no other"))
    for section, update in _updates(config).items():
        if (size := update.fsdp_config.fsdp_size) > world_size:
            shared = f"it is {size}, and all ranks ({world_size}) share one copy of the weights"
            found.append(DeadKey(f"{section}.fsdp_config.fsdp_size", shared))
        mini = update.ppo_mini_batch_size
        key = "data.train_batch_size" if mini is None else f"{section}.ppo_mini_batch_size"
        num_prompts[key] = mini or config.data.train_batch_size
    for key, count in num_prompts.items():
        samples = count * config.rollout.n
        if samples < world_size and not config.trainer.val_only:
            idle = f"its {samples} samples leave {world_size - samples} of {world_size} ranks"
            found.append(KeyNote(key, f"{idle} without work"))
    return found


def _updates(config: RunConfig) -> dict[str, UpdateConfig]:
    """Return the sections of the models that the run trains, or may train, by name."""
    critic: dict[str, UpdateConfig] = {} if has_no_critic(config) else {"critic": config.critic}
    return {"actor": config.actor} | critic


def check_model_length(
    config: RunConfig, model_max_len: int, *, file: str | Path | None = None
) -> None:
    """Check the budgets against the longest sequence that the model allows.

    Raises:
        ConfigError: if prompt and response, or `rollout.max_model_len`, are longer.
    """
    longest = max(longest_sequence(config), config.rollout.max_model_len or 0)
    if longest > model_max_len:
        problem = Problem(
            "data.max_response_length",
            f"{longest} tokens are more than the {model_max_len} of the model at "
            f"{config.model.path}",
            "data.max_prompt_length + data.max_response_length and rollout.max_model_len of at "
            f"most {model_max_len}",
        )
        raise_problems([problem], file)


def check_tools(
    named: Mapping[str, int], available: Collection[str], *, file: str | Path | None = None
) -> None:
    """Check that the run has the tools that the data name.

    Args:
        named: Tool name to the first row that names it (`PromptDataset.tools_named`).
        available: Names of the run's tools.
        file: The run file.

    Raises:
        ConfigError: naming each missing tool with its row.
    """
    known = ", ".join(sorted(available)) or "no tool: the run has none"
    problems = [
        Problem("rollout.multi_turn.tool_config_path", f"row {row} names the tool {name!r}", known)
        for name, row in named.items()
        if name not in available
    ]
    if problems:
        raise_problems(problems, file)
