"""`agentrl reward rescore`: score saved rollouts again, without generating anything.

Use it after a scorer was fixed or a judge was unavailable, or to test a rubric. Conversations do
not change; only `reward` and `reward_extra_info` do.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.config import parse_config
from agentrl.config.conflicts import find_scoring_problems
from agentrl.config.load import read_config
from agentrl.config.overrides import apply_overrides, key_of
from agentrl.config.problems import raise_problems
from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import ConfigError, Fault, printable
from agentrl.progress import NO_PROGRESS, Advance, Progress, ProgressDisplay
from agentrl.rewards import RewardManager, StreamingRewardManager, make_reward_manager
from agentrl.rewards.combination import SHAPING
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason
from agentrl.trainer.rollouts.files import (
    Line,
    SavedTrajectory,
    read_trajectories,
    save_lines,
    to_line,
)
from agentrl.trainer.rollouts.pictures import PictureCollector
from agentrl.trainer.setup.plugins import import_plugins
from agentrl.trainer.setup.preflight import claim_file

_NO_RUN = {"data": {"train_files": []}, "model": {"path": "none"}}


@dataclass(slots=True)
class Change:
    """The change of one data source's rewards."""

    num: int = 0
    num_changed: int = 0
    """Trajectories with another reward, with a new one, or without one that they had."""
    old: list[float] = field(default_factory=list[float])
    """The rewards before."""
    new: list[float] = field(default_factory=list[float])
    num_not_scored: int = 0
    """Trajectories that failed before they were scored; they are not changed."""
    failures: list[str] = field(default_factory=list[str])
    """Errors of the scorer."""

    def add(self, old: AsyncRolloutRequest, new: AsyncRolloutRequest) -> None:
        """Count one trajectory."""
        self.num += 1
        self.num_changed += old.reward != new.reward
        self.old += [] if old.reward is None else [old.reward]
        self.new += [] if new.reward is None else [new.reward]
        if new.error is not None and new.error.fault is Fault.REWARD:
            self.failures.append(f"{new.request_id}: {new.error.kind}: {new.error.message}")
        elif new.error is not None:
            self.num_not_scored += 1


def rescore_from_file(
    file: Path,
    run_file: Path | None,
    overrides: Sequence[str],
    console: Console,
    *,
    out: Path | None = None,
) -> dict[str, Change]:
    """Score a file of saved rollouts again, and print what changed.

    Args:
        file: A file that a run wrote to `trainer.rollout_data_dir`.
        run_file: The run file with the section `reward`; None for its defaults.
        overrides: `reward.<key>=value`.
        console: The console to print to.
        out: A new file for the trajectories with their new rewards; None to write none.

    Raises:
        ConfigError: for wrong keys, or if `out` exists.
        DataError: for a file that cannot be read.
    """
    config = read_reward_config(run_file, overrides)
    changes = rescore(file, config, out=out, progress=ProgressDisplay(console))
    console.print(changes_table(changes))
    lines = [failure for change in changes.values() for failure in change.failures][:5]
    lines += [] if out is None else [f"written to {out}"]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return changes


def read_reward_config(run_file: Path | None, overrides: Sequence[str]) -> RewardConfig:
    """Read the section `reward` of a run file, or its defaults, with overrides.

    Raises:
        ConfigError: for wrong keys, and for overrides of other sections.
    """
    for override in overrides:
        if not key_of(override).startswith("reward."):
            raise ConfigError(
                f"{override!r} does not change the scoring",
                key=key_of(override),
                expected="reward.<key>=value",
            )
    if run_file is not None:
        config = read_config(run_file, overrides).config
    else:
        merged = apply_overrides(OmegaConf.create(_NO_RUN), overrides)
        config = parse_config(cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=True)))
    import_plugins(config.plugins)
    if problems := list(find_scoring_problems(config)):
        raise_problems(problems, run_file)
    return config.reward


def rescore(
    file: Path,
    config: RewardConfig,
    *,
    out: Path | None = None,
    progress: Progress = NO_PROGRESS,
) -> dict[str, Change]:
    """Score a file of saved rollouts again.

    Completed trajectories are scored. Trajectories whose scoring failed are scored as completed
    ones. Consecutive trajectories of one step are scored together, as in the run, so that no group
    is split; a whole step is in memory. Recorded bonuses and penalties are kept, because scorers do
    not compute them.

    Args:
        file: A file that a run wrote to `trainer.rollout_data_dir`.
        config: How to score.
        out: A new file for the trajectories with their new rewards; None to write none.
        progress: Displays how many trajectories are scored.

    Returns:
        The changes by data source.

    Raises:
        ConfigError: if `out` exists.
        DataError: for a file that cannot be read.
        PluginError: if a scorer cannot be loaded.
    """
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already", key="--out", expected="a new file")
    if out is not None:
        claim_file(out, key="--out")
    manager = make_reward_manager(config)
    changes: dict[str, Change] = {}
    with asyncio.Runner() as runner:
        try:
            with progress.bar("rescore", _count_lines(file)) as advance:
                saved = read_trajectories(file)
                lines = _rescored_lines(saved, manager, runner, changes, advance)
                if out is None:
                    deque(lines, maxlen=0)  # consume the iterator
                else:
                    save_lines(out, lines)
        finally:
            runner.run(manager.close())
    return changes


def _count_lines(file: Path) -> int | None:
    if not file.is_file():
        return None
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def _rescored_lines(
    saved: Iterator[SavedTrajectory],
    manager: RewardManager,
    runner: asyncio.Runner,
    changes: dict[str, Change],
    advance: Advance,
) -> Iterable[Line]:
    pictures = PictureCollector()
    for _, group in groupby(saved, key=lambda trajectory: trajectory.step):
        of_step = list(group)
        fresh = [unscored(trajectory.request) for trajectory in of_step]
        runner.run(score_as_in_run(manager, fresh))
        advance(len(fresh))
        for trajectory, new in zip(of_step, fresh, strict=True):
            old = trajectory.request
            keep_shaping(old, new)
            changes.setdefault(old.data_source, Change()).add(old, new)
            yield to_line(new, trajectory.step, pictures, trajectory.skipped)


async def score_as_in_run(manager: RewardManager, requests: Sequence[AsyncRolloutRequest]) -> None:
    """Score the requests of one step with the same calls as a run.

    A batch scorer may compare the samples of a group, so it gets whole groups: one per call with
    `reward.launch_reward_fn_async`, else all of a step.
    """
    if not isinstance(manager, StreamingRewardManager):
        await manager.score(requests)
        return
    async with manager.scoring(requests) as scores:
        for request in requests:
            scores.begin(request)
        await scores.done()


def unscored(request: AsyncRolloutRequest) -> AsyncRolloutRequest:
    """Copy a request, and remove its score if it can be scored again.

    If its scoring failed, the copy has the stop reason `answered`, because the real one is lost.
    """
    error = request.error
    if error is not None and error.fault is Fault.REWARD:
        ended = {"state": str(RequestState.COMPLETED), "stop_reason": str(StopReason.ANSWERED)}
        saved = request.model_dump(mode="json") | ended | {"error": None}
        return AsyncRolloutRequest.model_validate(saved)
    copied = request.model_copy(deep=True)
    if copied.state is RequestState.COMPLETED:
        copied.reward, copied.reward_extra_info = None, {}
    return copied


def keep_shaping(old: AsyncRolloutRequest, new: AsyncRolloutRequest) -> None:
    """Copy the recorded bonuses and penalties, which scorers do not compute."""
    if new.reward is not None:
        names = {source.value for source in SHAPING}
        kept = {key: value for key, value in old.reward_extra_info.items() if key in names}
        new.reward_extra_info |= kept


def changes_table(changes: dict[str, Change]) -> Table:
    """Make a table of the changes, a row for each data source."""
    table = Table(title="mean rewards before and now", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("data source", overflow="fold")
    for title in ("rollouts", "before", "now", "changed", "failed", "not scored"):
        table.add_column(title, justify="right", no_wrap=True)
    for source, change in sorted(changes.items()):
        counts = (change.num_changed, len(change.failures), change.num_not_scored)
        means = map(_mean, (change.old, change.new))
        table.add_row(Text(printable(source)), str(change.num), *means, *map(str, counts))
    return table


def _mean(rewards: Sequence[float]) -> str:
    return f"{sum(rewards) / len(rewards):.4f}" if rewards else "-"
