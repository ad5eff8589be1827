"""Load the rows of a run and check them against its plug-ins and budgets."""

import hashlib
import json
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from agentrl.agent_loops.routing import AGENT_NAME, check_agents
from agentrl.config.checks import check_tools
from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.run import RunConfig
from agentrl.data.dataset import PromptDataset, load_prompts, read_prompts
from agentrl.data.lengths import drop_overlong, measure_prompts
from agentrl.data.rows import Prompt
from agentrl.errors import DataError, RewardError, did_you_mean
from agentrl.interactions import BaseInteraction
from agentrl.interactions.registry import NO_INTERACTION, select_interaction
from agentrl.messages import Message
from agentrl.rewards import RewardManager
from agentrl.rewards.loading import is_bundled_scorer
from agentrl.rewards.managers import check_code_scorers, readers_of_truth
from agentrl.rollout.media import load_messages
from agentrl.rollout.templates import TemplateNeeds, TemplateReport, require
from agentrl.tools import BaseTool
from agentrl.tools.registry import select_tools
from agentrl.tools.row_kwargs import RowKwargs
from agentrl.trainer.setup.plugins import NOTHING, Given
from agentrl.trainer.setup.rollout_setup import RolloutSetup, template_needs


@dataclass(frozen=True, slots=True)
class RunData:
    """The rows of a run; all of them can be used."""

    train: PromptDataset
    val: dict[str, PromptDataset]
    """Validation sets by name; the run is judged by the first one."""
    notes: tuple[str, ...]
    """Sentences on dropped rows and possible mistakes."""


def load_run_data(config: RunConfig, setup: RolloutSetup, given: Given = NOTHING) -> RunData:
    """Load training and validation rows.

    Args:
        config: The run's configuration.
        setup: The run's plug-ins and template.
        given: Rows that were passed as Python objects.

    Raises:
        DataError: for a file or row that cannot be used.
        ConfigError: for a tool that a row names and the run does not have.
    """
    notes: list[str] = []
    data = config.data

    def load(name: str, files: list[Path], max_samples: int | None) -> PromptDataset:
        source, rows = ", ".join(map(str, files)), given.rows_of(name)
        dataset = (
            load_prompts(files, data, max_samples=max_samples)
            if rows is None
            else read_prompts(rows, data, source=f"{name} rows {source}", max_samples=max_samples)
        )
        notes.extend(f"{name}: {note}" for note in check_dataset(dataset, config, setup, source))
        if not data.filter_overlong_prompts and data.truncation != "error":
            return dataset
        lengths = measure_prompts(
            dataset,
            prompt_encoder(setup),
            fingerprint=fingerprint_of(setup),
            cache_dir=data.cache_dir,
            num_workers=data.filter_num_workers,
        )
        if not data.filter_overlong_prompts:
            refuse_overlong(dataset, lengths, data.max_prompt_length, file=source)
            return dataset
        filtered = drop_overlong(dataset, lengths, data.max_prompt_length)
        if filtered.num_dropped:
            notes.append(f"{name}: {filtered}")
        return filtered.dataset

    train = PromptDataset([])
    if not config.trainer.val_only:
        train = load("train", data.train_files, data.train_max_samples)
    val = {name: load(name, [file], data.val_max_samples) for name, file in data.val_files.items()}
    return RunData(train, val, tuple(notes))


def check_dataset(
    dataset: PromptDataset, config: RunConfig, setup: RolloutSetup, source: str
) -> Iterator[str]:
    """Check rows against the template, the plug-ins and the scorers.

    Yields:
        Notes for the user, a sentence each.

    Raises:
        DataError: for a row that cannot be used.
        ConfigError: for a tool that a row names and the run does not have.
    """
    data, reward, plugins = config.data, config.reward, setup.plugins
    check_system_messages(dataset, setup.report, template_needs(config, plugins))
    if plugins.tools or data.strict_rows:
        check_tools(dataset.tools_named(), [tool.name for tool in plugins.tools], file=source)
    check_agent_names(dataset, check_agents(config), file=source)
    yield from note_tools(dataset, plugins.tools, setup.tools_per_row)
    checks = RowKwargs(plugins.tools)
    for prompt in dataset:
        with _naming_row(prompt, source):
            checks.check(prompt.tools_kwargs)
    yield from checks.notes
    check_interactions(dataset, plugins.interactions, file=source, is_strict=data.strict_rows)
    check_sources(dataset, reward, file=source)
    yield from note_missing_truths(dataset, reward, plugins.rewards, file=source)
    if plugins.interactions and not is_answered(dataset, plugins.interactions):
        yield "no row selects an interaction, so the policy gets no replies"
    if not plugins.interactions and (asking := sum(map(asks_for_interaction, dataset))):
        yield f"{_rows(asking)} ask for an interaction: the run has none"


def check_agent_names(dataset: PromptDataset, known: Collection[str], *, file: str) -> None:
    """Refuse rows whose column `agent_name` names no agent of the run.

    Raises:
        DataError: with the row.
    """
    for prompt in dataset:
        name = prompt.columns.get(AGENT_NAME)
        if name and name not in known:
            raise DataError(
                f"the row's {AGENT_NAME} is {name!r}" + did_you_mean(str(name), known),
                file=file,
                row=prompt.index,
                expected=f"one of {', '.join(sorted(known))}",
            )


def check_system_messages(
    dataset: PromptDataset, report: TemplateReport, needs: TemplateNeeds
) -> None:
    """Refuse rows with a system message if the template rewrites turns only after one.

    Raises:
        TemplateError: with what the template rewrites.
    """
    if not any(found.after_system for found in needs.histories(report)):
        return
    if any(message.role == "system" for prompt in dataset for message in prompt.messages):
        require(report, replace(needs, system=True))


def refuse_overlong(
    dataset: PromptDataset, lengths: Sequence[int], max_length: int, *, file: str
) -> None:
    """Refuse prompts that are longer than their budget and are neither dropped nor cut.

    Raises:
        DataError: with the first such row.
    """
    for prompt, length in zip(dataset, lengths, strict=True):
        if length > max_length:
            raise DataError(
                f"a prompt of {length} tokens is longer than data.max_prompt_length, {max_length}",
                file=file,
                row=prompt.index,
                expected="data.filter_overlong_prompts=true, a data.truncation of left, right or "
                "middle, or a larger budget",
            )


def check_sources(dataset: PromptDataset, config: RewardConfig, *, file: str) -> None:
    """Check that every data source has a bundled scorer, if scorers are chosen by data source.

    Raises:
        DataError: with the first row of a source without a scorer.
        SandboxError: if a scorer runs code that this machine cannot isolate.
        MissingExtraError: if a scorer needs a package that is not installed.
    """
    for name, row in dataset.sources().items():
        try:
            check_code_scorers(config, [name])
        except RewardError as error:
            details = {"file": file, "row": row, **error.details}
            raise DataError(str(error.args[0]), **details) from None


def note_missing_truths(
    dataset: PromptDataset, config: RewardConfig, rewards: RewardManager, *, file: str
) -> Iterator[str]:
    """Report rows without ground truth, if all are without and the scorer reads it.

    Raises:
        DataError: if a bundled scorer reads it: it cannot score such a row.
    """
    readers = readers_of_truth(rewards) if config.weights.trajectory else []
    if not readers or any(prompt.ground_truth is not None for prompt in dataset):
        return
    missing = f"none of the {_rows(len(dataset))} of {file} has reward_model.ground_truth"
    if any(is_bundled_scorer(reader) for reader in readers):
        raise DataError(
            f"{missing}, which the bundled scorer needs",
            file=file,
            key="reward_model",
            expected="rows with reward_model: {ground_truth: ...}, or a scorer of your own in "
            "reward.custom_reward_function",
        )
    yield f"{missing}: the scorer gets None"


def note_tools(
    dataset: PromptDataset, tools: Sequence[BaseTool], per_row: Literal["all", "tools_kwargs"]
) -> Iterator[str]:
    """Report rows that do not fit the run's tools, although the run can continue."""
    named = ", ".join(dataset.tools_named())
    if named and not tools:
        yield f"rows name the tools {named}, and the run has none: no row is shown a tool"
    bare = sum(not prompt.tools_kwargs and prompt.tool_selection is None for prompt in dataset)
    if tools and bare and per_row == "tools_kwargs":
        yield (
            f"{bare} of {len(dataset)} rows have no tools_kwargs and are shown no tool "
            "(rollout.multi_turn.tools_per_row: tools_kwargs)"
        )
    unmet = sum(
        bool(prompt.extra_info.get("need_tools_kwargs")) and not prompt.tools_kwargs
        for prompt in dataset
    )
    if unmet:
        yield f"{_rows(unmet)} with need_tools_kwargs and no tools_kwargs"


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


@contextmanager
def _naming_row(prompt: Prompt, file: str) -> Generator[None]:
    try:
        yield
    except DataError as error:
        error.details |= {"file": file, "row": prompt.index}
        raise


def check_interactions(
    dataset: PromptDataset,
    interactions: Mapping[str, BaseInteraction],
    *,
    file: str,
    is_strict: bool = True,
) -> None:
    """Check that the run has the interactions that rows ask for.

    Args:
        dataset: The rows.
        interactions: The run's interactions by name.
        file: Named in the error.
        is_strict: Whether a row may not ask for one if the run has none (`data.strict_rows`).

    Raises:
        DataError: with the first row that asks for one that the run does not have.
    """
    for prompt in dataset:
        if is_strict and not interactions and asks_for_interaction(prompt):
            name = prompt.interaction_kwargs.get("name")
            which = "an interaction" if name is None else f"the interaction {name!r}"
            raise DataError(
                f"the row asks for {which}, and the run has none",
                key="rollout.multi_turn.interaction_config_path",
                file=file,
                row=prompt.index,
                expected="a YAML of interactions; or interaction_kwargs: {name: none} in rows "
                "without one; or data.strict_rows: false, to run such rows without one",
            )
        with _naming_row(prompt, file):
            _interaction_of(prompt, interactions)


def asks_for_interaction(prompt: Prompt) -> bool:
    """Return whether a row asks for an interaction, by name or by kwargs."""
    kwargs = prompt.interaction_kwargs
    return bool(kwargs) and kwargs.get("name") != NO_INTERACTION


def is_answered(dataset: Iterable[Prompt], interactions: Mapping[str, BaseInteraction]) -> bool:
    """Return whether any row selects an interaction."""
    return any(_interaction_of(prompt, interactions) for prompt in dataset)


def _interaction_of(
    prompt: Prompt, interactions: Mapping[str, BaseInteraction]
) -> BaseInteraction | None:
    kwargs, source = prompt.interaction_kwargs, prompt.data_source
    return select_interaction(interactions, kwargs, data_source=source)


def prompt_encoder(setup: RolloutSetup) -> Callable[[Prompt], list[int]]:
    """Make a function that renders a row's prompt with the tools that the row may use."""

    def encode(prompt: Prompt) -> list[int]:
        tools = select_tools(
            setup.plugins.tools,
            tool_selection=prompt.tool_selection,
            tools_kwargs=prompt.tools_kwargs,
            per_row=setup.tools_per_row,
        )
        messages = prompt.messages
        if prompt.multi_modal_data:
            messages = load_messages(messages, prompt.multi_modal_data, setup.processor)
        return setup.template.encode_prompt(messages, [tool.tool_schema for tool in tools])

    return encode


def fingerprint_of(setup: RolloutSetup) -> str:
    """Hash everything besides the row that a prompt's tokens depend on: tokenizer, template, tools.

    Changing this hash changes the fingerprint in checkpoints and the names of cached lengths.
    """
    vocabulary = sorted(setup.tokenizer.get_vocab().items())
    digest = hashlib.sha256(repr(vocabulary).encode())
    digest.update(repr(setup.template.encode_prompt([Message(role="user", content="")])).encode())
    digest.update(setup.template.structure.renderer.source.encode())
    if setup.processor is not None:
        digest.update(setup.processor.encoder.key.encode())
    for tool in setup.plugins.tools:
        digest.update(json.dumps(tool.tool_schema.to_template(), sort_keys=True).encode())
    if setup.tools_per_row != "all":
        digest.update(setup.tools_per_row.encode())
    return digest.hexdigest()
