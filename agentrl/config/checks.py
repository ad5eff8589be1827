"""What can be told of a run before any model loads: contradictions, dead keys, biases."""

from collections.abc import Collection, Mapping
from pathlib import Path

from agentrl.config.contradictions import find_contradictions, longest_sequence
from agentrl.config.dead_keys import KeyNote, find_dead_keys
from agentrl.config.problems import Problem, raise_problems
from agentrl.config.schema import RunConfig


class Bias(KeyNote):
    """A setting that is allowed and makes the training differ from what its formulas say."""

    def __str__(self) -> str:
        return f"{self.key} biases the training: {self.reason}"


def check_config(
    config: RunConfig, *, world_size: int = 1, file: str | Path | None = None
) -> list[KeyNote]:
    """Refuse what contradicts itself, and list what the user should be told.

    Returns:
        Dead keys and biases, to be printed before the run.

    Raises:
        ConfigError: with every contradiction, a line for each.
    """
    if problems := find_contradictions(config, world_size=world_size):
        raise_problems(problems, file)
    return [*find_dead_keys(config), *find_biases(config)]


def find_biases(config: RunConfig) -> list[Bias]:
    """Find the settings that are allowed and biased."""
    reason = "log-probabilities are those of the full distribution, not of the one sampled from"
    biases: list[Bias] = []
    if config.rollout.top_p < 1:
        biases.append(Bias("rollout.top_p", reason))
    if config.rollout.top_k > 0:
        biases.append(Bias("rollout.top_k", reason))
    return biases


def check_model_length(
    config: RunConfig, model_max_len: int, *, file: str | Path | None = None
) -> None:
    """Hold the budgets against the longest sequence that the model itself allows.

    Raises:
        ConfigError: where prompt and response, or `rollout.max_model_len`, are longer.
    """
    longest = max(longest_sequence(config), config.rollout.max_model_len or 0)
    if longest > model_max_len:
        told = f"{longest} tokens are more than the {model_max_len} of the model at"
        problem = Problem(
            "data.max_response_length", f"{told} {config.model.path}", _fits(model_max_len)
        )
        raise_problems([problem], file)


def check_tools(
    named: Mapping[str, int], available: Collection[str], *, file: str | Path | None = None
) -> None:
    """Hold the tools that the data names against those that the run has.

    Args:
        named: Tool name to the first row that names it (`PromptDataset.tools_named`).
        available: Names of the run's tools.
        file: The run file.

    Raises:
        ConfigError: naming each absent tool with its row.
    """
    known = ", ".join(sorted(available)) or "no tool: the run has none"
    problems = [
        Problem("rollout.multi_turn.tool_config_path", f"row {row} names the tool {name!r}", known)
        for name, row in named.items()
        if name not in available
    ]
    if problems:
        raise_problems(problems, file)


def _fits(model_max_len: int) -> str:
    return (
        f"data.max_prompt_length + data.max_response_length and rollout.max_model_len of at most "
        f"{model_max_len}"
    )
