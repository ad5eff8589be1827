"""Explain what a run file means: every key resolved, and the batch arithmetic.

The output is a run file again: everything but the keys is in comments.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml

from agentrl.config.conflicts import longest_sequence
from agentrl.config.dead_keys import num_mini_batches
from agentrl.config.load import read_config
from agentrl.config.schema.run import RunConfig
from agentrl.config.secrets import REDACTED, without_secrets
from agentrl.config.verl import VerlReport
from agentrl.errors import ConfigError


def describe(config: RunConfig, *, world_size: int = 1, num_rows: int | None = None) -> str:
    """Write the resolved configuration, then its batch arithmetic.

    Args:
        config: A checked run file.
        world_size: Ranks that share each batch.
        num_rows: Training rows, if they are known; adds the length of an epoch.
    """
    arithmetic = [*_batch(config, world_size), *_tokens(config), *_length(config, num_rows)]
    return to_yaml(config) + "\n" + "\n".join(f"# {line}" for line in arithmetic) + "\n"


def to_yaml(config: RunConfig) -> str:
    """Write the configuration with every default filled in; `load_config` reads it back.

    Secrets are replaced, because others read what is printed or saved.
    """
    whole = config.model_dump(mode="json")
    # A preset conflicts with explicit keys, so its settings are written in its place.
    correction = config.algorithm.rollout_correction.effective
    whole["algorithm"]["rollout_correction"] = correction.model_dump(mode="json")
    return yaml.safe_dump(without_secrets(whole), sort_keys=False, allow_unicode=True)


def to_short_yaml(config: RunConfig) -> str:
    """Write the keys that were set, and no default; `load_config` reads it back.

    Secrets are replaced, and a comment says that the user must write them again.
    """
    given = config.model_dump(mode="json", exclude_unset=True)
    shown = without_secrets(given)
    note = "" if shown == given else f"# Write the secrets again in the place of {REDACTED}.\n"
    return note + yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def comment(report: VerlReport) -> str:
    """Write the report on verl's keys as a comment of a run file."""
    return "".join(f"# {line}\n" for line in report.describe().splitlines())


def convert_from_verl(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Write the run of a file in verl's key tree in agentrl's keys, with the report above them.

    Args:
        path: The file; it may be empty if `overrides` say everything.
        overrides: As on verl's command line.

    Raises:
        ConfigError: see `load_config`, and for a file that is in agentrl's keys.
    """
    config, report = read_config(path, overrides)
    if report is None:
        raise ConfigError(
            "the file has agentrl's keys already",
            file=path,
            expected="verl's, such as actor_rollout_ref.model.path",
        )
    return comment(report) + to_short_yaml(config)


def _batch(config: RunConfig, world_size: int) -> list[str]:
    prompts, n, epochs = config.data.train_batch_size, config.rollout.n, config.actor.ppo_epochs
    minis, rows = num_mini_batches(config, config.actor), prompts * n
    taken = config.prompts_per_rollout
    sampled = [f"Prompts are sampled {taken} at a time until {prompts} groups have a signal."]
    each, more = divmod(rows, world_size)
    share = f"{each} or {each + 1} rows" if more else _count(each, "row")
    return [
        *(sampled if taken != prompts else []),
        f"One training step: {_count(prompts, 'prompt')} x {_count(n, 'sample')} = "
        f"{_count(rows, 'row')}, {share} on each of {_count(world_size, 'rank')}.",
        f"It is cut into {_count(minis, 'mini-batch', 'mini-batches')} of "
        f"{_count(prompts // minis, 'prompt')} ({_count(rows // minis, 'row')}) and gone through "
        f"{_count(epochs, 'time')}: {_count(minis * epochs, 'optimizer step')} for each "
        f"training step.",
    ]


def _tokens(config: RunConfig) -> list[str]:
    data, packed = config.data, config.actor.ppo_max_token_len_per_gpu
    if packed is not None:
        packed *= config.actor.ulysses_sequence_parallel_size
    multi_turn = config.rollout.multi_turn
    turn = multi_turn.max_tokens_per_turn or data.max_response_length
    longest = longest_sequence(config)
    return [
        f"A sequence has at most {data.max_prompt_length} + {data.max_response_length} = {longest} "
        f"tokens: prompt and response; a turn samples at most {turn}, an observation shows at most "
        f"{multi_turn.max_tool_response_length}.",
        "The packed micro-batches have the size that suits the device."
        if packed is None
        else f"A packed micro-batch of {packed} tokens holds at least "
        f"{_count(packed // longest, 'sequence')}.",
    ]


def _length(config: RunConfig, num_rows: int | None) -> list[str]:
    trainer, size = config.trainer, config.prompts_per_rollout
    if trainer.total_training_steps is not None:
        total = f"The run has {_count(trainer.total_training_steps, 'training step')}."
    else:
        total = f"The run goes through the data {_count(trainer.total_epochs, 'time')}."
    if num_rows is None:
        return [total]
    steps, left = divmod(num_rows, size)
    epoch = f"An epoch of {_count(num_rows, 'row')} has {_count(steps, 'training step')}"
    return [total, f"{epoch}; {_count(left, 'row')} do not fill a batch and are left out of it."]


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
