"""Load the rows of a run and hold them against its plug-ins and budgets."""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from agentrl.config.checks import check_tools
from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.run import RunConfig
from agentrl.data.dataset import PromptDataset, load_prompts, read_prompts
from agentrl.data.lengths import drop_overlong, measure_prompts
from agentrl.data.rows import Prompt
from agentrl.errors import DataError, RewardError
from agentrl.interactions import BaseInteraction
from agentrl.interactions.registry import NO_INTERACTION, select_interaction
from agentrl.messages import Message
from agentrl.rewards.loading import scores_by_source
from agentrl.rewards.managers import check_code_scorers
from agentrl.rewards.sources import has_bundled
from agentrl.rollout.templates import TemplateNeeds, TemplateReport, require
from agentrl.tools import BaseTool
from agentrl.tools.registry import select_tools
from agentrl.tools.row_kwargs import RowKwargs
from agentrl.trainer.setup.plugins import NOTHING, Given
from agentrl.trainer.setup.rollout_setup import RolloutSetup, template_needs


@dataclass(frozen=True, slots=True)
class RunData:
    """The rows of a run, all of them usable."""

    train: PromptDataset
    val: dict[str, PromptDataset]
    """By name; the first is the one that a run is judged by."""
    notes: tuple[str, ...]
    """What was dropped, in words."""


def load_run_data(config: RunConfig, setup: RolloutSetup, given: Given = NOTHING) -> RunData:
    """Load training and validation rows.

    Args:
        config: Of the run.
        setup: Its plug-ins and template.
        given: Rows that were passed as Python objects.

    Raises:
        DataError: for a file or row that cannot be used.
        ConfigError: for a tool that a row names and the run does not have.
    """
    notes: list[str] = []
    data = config.data
    loader = _Loader(config, setup, notes, given)
    train = PromptDataset([])
    if not config.trainer.val_only:
        train = loader.load("train", data.train_files, data.train_max_samples)
    val = {
        name: loader.load(name, [file], data.val_max_samples)
        for name, file in data.val_files.items()
    }
    return RunData(train, val, tuple(notes))


class _Loader:
    """Loads one set after the other by the same rules."""

    def __init__(
        self, config: RunConfig, setup: RolloutSetup, notes: list[str], given: Given
    ) -> None:
        self._config = config
        self._given = given
        self._setup = setup
        self._notes = notes
        self._encode = prompt_encoder(setup)

    def load(self, name: str, files: list[Path], max_samples: int | None) -> PromptDataset:
        data = self._config.data
        source = ", ".join(map(str, files))
        rows = self._given.rows_of(name)
        dataset = (
            load_prompts(files, data, max_samples=max_samples)
            if rows is None
            else read_prompts(rows, data, source=f"{name} rows {source}", max_samples=max_samples)
        )
        self._notes += (f"{name}: {note}" for note in self._check(dataset, source))
        if data.filter_overlong_prompts or data.truncation == "error":
            return self._without_overlong(name, dataset, source)
        return dataset

    def _check(self, dataset: PromptDataset, source: str) -> Iterator[str]:
        """Check the rows against the template, the plug-ins and the scorers.

        Yields:
            What the user should know: a sentence each.
        """
        data, reward, plugins = self._config.data, self._config.reward, self._setup.plugins
        needs = template_needs(self._config, plugins)
        check_system_messages(dataset, self._setup.report, needs)
        if plugins.tools or data.strict_rows:
            check_tools(dataset.tools_named(), [tool.name for tool in plugins.tools], file=source)
        yield from note_tools(dataset, plugins.tools, self._setup.tools_per_row)
        yield from check_tools_kwargs(dataset, plugins.tools, file=source)
        check_interactions(dataset, plugins.interactions, file=source, is_strict=data.strict_rows)
        check_sources(dataset, reward, file=source)
        yield from note_unscored(dataset, reward)
        if plugins.interactions and not is_answered(dataset, plugins.interactions):
            yield "no row selects an interaction, so nobody answers"
        if not plugins.interactions and (asking := sum(map(asks_for_interaction, dataset))):
            yield f"{_rows(asking)} ask for an interaction: the run has none"

    def _without_overlong(self, name: str, dataset: PromptDataset, source: str) -> PromptDataset:
        """Drop or refuse prompts over their budget, as the configuration says."""
        data = self._config.data
        lengths = measure_prompts(
            dataset,
            self._encode,
            fingerprint=fingerprint_of(self._setup),
            cache_dir=data.cache_dir,
            num_workers=data.filter_num_workers,
        )
        if not data.filter_overlong_prompts:
            refuse_overlong(dataset, lengths, data.max_prompt_length, file=source)
            return dataset
        filtered = drop_overlong(dataset, lengths, data.max_prompt_length)
        if filtered.num_dropped:
            self._notes.append(f"{name}: {filtered}")
        return filtered.dataset


def check_system_messages(
    dataset: PromptDataset, report: TemplateReport, needs: TemplateNeeds
) -> None:
    """Refuse rows with a system message if the template rewrites turns only after one.

    Raises:
        TemplateError: with what the template rewrites.
    """
    if not any(found.behind_system for found in needs.histories(report)):
        return
    if any(message.role == "system" for prompt in dataset for message in prompt.messages):
        require(report, replace(needs, system=True))


def refuse_overlong(
    dataset: PromptDataset, lengths: Sequence[int], max_length: int, *, file: str
) -> None:
    """Refuse a prompt over its budget, where it is neither dropped nor cut.

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
    """Hold the rows' data sources against the bundled scorers, where they say who scores.

    Raises:
        DataError: with the first row whose source has none.
        SandboxError: for a source whose scorer runs code that nothing here keeps in.
        MissingExtraError: likewise.
    """
    for name, row in dataset.sources().items():
        try:
            check_code_scorers(config, [name])
        except RewardError as error:
            told = {"file": file, "row": row, **error.details}
            raise DataError(str(error.args[0]), **told) from None


def note_unscored(dataset: PromptDataset, config: RewardConfig) -> Iterator[str]:
    """Say which data sources nobody scores, where that is allowed."""
    if not scores_by_source(config):
        return
    for name in dataset.sources():
        if not has_bundled(name):
            yield (
                f"the data source {name!r} has no bundled scorer, which reward.weights.trajectory: "
                "0 allows: its scores are 0, and none of its rows counts as a success"
            )


def note_tools(
    dataset: PromptDataset, tools: Sequence[BaseTool], per_row: Literal["all", "tools_kwargs"]
) -> Iterator[str]:
    """Say where rows and the run's tools do not fit together, and the run goes on all the same."""
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


def check_tools_kwargs(
    dataset: PromptDataset, tools: Sequence[BaseTool], *, file: str
) -> list[str]:
    """Check the rows' `tools_kwargs` against the methods that will receive them.

    Returns:
        Keys that look like slips and are no errors.

    Raises:
        DataError: with the first row that cannot be used.
    """
    checks = RowKwargs(tools)
    for prompt in dataset:
        with _naming_row(prompt, file):
            checks.check(prompt.tools_kwargs)
    return checks.notes


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
    """Check the interactions that rows ask for against those that the run has.

    Args:
        dataset: The rows.
        interactions: The run's, by name.
        file: Named in the error.
        is_strict: Whether a row may not ask for one if the run has none (`data.strict_rows`).

    Raises:
        DataError: with the first row that asks for one that the run does not have.
    """
    if not interactions and is_strict:
        refuse_interactions(dataset, file=file)
    for prompt in dataset:
        with _naming_row(prompt, file):
            _interaction_of(prompt, interactions)


def refuse_interactions(dataset: PromptDataset, *, file: str) -> None:
    """Check that no row of a run without interactions asks for one.

    Raises:
        DataError: with the first row that does.
    """
    for prompt in dataset:
        if asks_for_interaction(prompt):
            name = prompt.interaction_kwargs.get("name")
            which = "an interaction" if name is None else f"the interaction {name!r}"
            raise DataError(
                f"the row asks for {which}, and the run has none",
                key="rollout.multi_turn.interaction_config_path",
                file=file,
                row=prompt.index,
                expected="a YAML of interactions; or interaction_kwargs: {name: none} in rows that "
                "want none; or data.strict_rows: false, with which such rows run without",
            )


def asks_for_interaction(prompt: Prompt) -> bool:
    """Whether a row asks for an interaction, be it by name or by kwargs alone."""
    kwargs = prompt.interaction_kwargs
    return bool(kwargs) and kwargs.get("name") != NO_INTERACTION


def is_answered(dataset: PromptDataset, interactions: Mapping[str, BaseInteraction]) -> bool:
    """Whether any row selects an interaction."""
    return any(_interaction_of(prompt, interactions) for prompt in dataset)


def _interaction_of(
    prompt: Prompt, interactions: Mapping[str, BaseInteraction]
) -> BaseInteraction | None:
    return select_interaction(
        interactions, prompt.interaction_kwargs, data_source=prompt.data_source
    )


def prompt_encoder(setup: RolloutSetup) -> Callable[[Prompt], list[int]]:
    """Make the function that renders a row's prompt with the tools that it may use."""

    def encode(prompt: Prompt) -> list[int]:
        tools = select_tools(
            setup.plugins.tools,
            tool_selection=prompt.tool_selection,
            tools_kwargs=prompt.tools_kwargs,
            per_row=setup.tools_per_row,
        )
        return setup.template.encode_prompt(prompt.messages, [tool.tool_schema for tool in tools])

    return encode


def fingerprint_of(setup: RolloutSetup) -> str:
    """Hash what a prompt's tokens depend on beside the row: tokenizer, template, tools."""
    vocabulary = sorted(setup.tokenizer.get_vocab().items())
    digest = hashlib.sha256(repr(vocabulary).encode())
    digest.update(repr(setup.template.encode_prompt([Message(role="user", content="")])).encode())
    digest.update(setup.template.structure.renderer.source.encode())
    for tool in setup.plugins.tools:
        digest.update(json.dumps(tool.tool_schema.to_template(), sort_keys=True).encode())
    if setup.tools_per_row != "all":
        digest.update(setup.tools_per_row.encode())
    return digest.hexdigest()
