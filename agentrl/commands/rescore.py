"""Score saved rollouts anew, without generating anything (`agentrl reward rescore`).

For a scorer that was mended, a judge that was down, a rubric that is being tried: what would the
rewards have been? Conversations stay as they are; only `reward` and `reward_extra_info` change.
"""

import asyncio
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
from agentrl.rewards import RewardManager, StreamingRewardManager, make_reward_manager
from agentrl.rewards.combination import SHAPING
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason
from agentrl.trainer.rollouts.files import SavedTrajectory, read_trajectories, save_lines, to_line
from agentrl.trainer.setup.plugins import import_plugins
from agentrl.trainer.setup.preflight import claim_file

_NO_RUN = {"data": {"train_files": []}, "model": {"path": "none"}}


@dataclass(slots=True)
class Change:
    """How the rewards of one data source changed."""

    num: int = 0
    num_changed: int = 0
    """Whose reward is another one, or is there or gone."""
    old: list[float] = field(default_factory=list[float])
    """Rewards before, of those that had one."""
    new: list[float] = field(default_factory=list[float])
    num_not_scored: int = 0
    """Which had failed by something else than their reward, and are left as they were."""
    failures: list[str] = field(default_factory=list[str])
    """What the scorer failed with now."""

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
    """Score a file of saved rollouts anew, and print what changed.

    Args:
        file: As a run writes them to `trainer.rollout_data_dir`.
        run_file: Whose section `reward` is used; None: its defaults.
        overrides: `reward.<key>=value`.
        console: The table goes there.
        out: Where the trajectories go with their new rewards; None: nowhere.

    Raises:
        ConfigError: for keys that cannot be meant, and for an `out` that is there already.
        DataError: for a file that cannot be read.
    """
    changes = rescore(file, read_reward_config(run_file, overrides), out=out)
    console.print(changes_table(changes))
    for failure in [told for change in changes.values() for told in change.failures][:5]:
        console.print(failure, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        console.print(f"written to {out}", markup=False, highlight=False, soft_wrap=True)
    return changes


def read_reward_config(run_file: Path | None, overrides: Sequence[str]) -> RewardConfig:
    """Read how to score: the section `reward` of a run file, or its defaults, and overrides.

    Raises:
        ConfigError: for what cannot be meant, and for overrides of other sections.
    """
    for override in overrides:
        if not key_of(override).startswith("reward."):
            raise ConfigError(
                f"{override!r} changes nothing of the scoring",
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


def rescore(file: Path, config: RewardConfig, *, out: Path | None = None) -> dict[str, Change]:
    """Score a file of saved rollouts anew.

    Trajectories that had completed are scored, and those that had failed by their reward, as if
    they had been answered. Those of a step that stand together are scored together, as in the run:
    a step is in memory at once, and no group is split. Bonuses and penalties are no scorer's, and
    stay as they were recorded.

    Args:
        file: As a run writes them to `trainer.rollout_data_dir`.
        config: How to score.
        out: A new file for the trajectories with their new rewards; None: none is written.

    Returns:
        What changed, by data source.

    Raises:
        ConfigError: for an `out` that is there already: nothing is written over.
        DataError: for a file that cannot be read.
        PluginError: where a scorer cannot be loaded.
    """
    if out is not None and out.exists():
        raise ConfigError(f"{out} is there already", key="--out", expected="a new file")
    if out is not None:
        claim_file(out, key="--out")
    manager = make_reward_manager(config)
    changes: dict[str, Change] = {}
    with asyncio.Runner() as runner:
        try:
            lines = _rescored_lines(read_trajectories(file), manager, runner, changes)
            if out is None:
                for _ in lines:
                    pass
            else:
                save_lines(out, lines)
        finally:
            runner.run(manager.close())
    return changes


def _rescored_lines(
    saved: Iterator[SavedTrajectory],
    manager: RewardManager,
    runner: asyncio.Runner,
    changes: dict[str, Change],
) -> Iterable[str]:
    for _, group in groupby(saved, key=lambda trajectory: trajectory.step):
        of_step = list(group)
        fresh = [unscored(trajectory.request) for trajectory in of_step]
        runner.run(score_as_in_run(manager, fresh))
        for trajectory, new in zip(of_step, fresh, strict=True):
            old = trajectory.request
            keep_shaping(old, new)
            changes.setdefault(old.data_source, Change()).add(old, new)
            yield to_line(new, trajectory.step, trajectory.skipped)


async def score_as_in_run(manager: RewardManager, requests: Sequence[AsyncRolloutRequest]) -> None:
    """Score what rolled out together, in the calls in which a run would score it.

    A scorer of batches may compare the samples of a group: so it gets whole groups, one in a call
    under `reward.launch_reward_fn_async`, else all of a step.
    """
    if not isinstance(manager, StreamingRewardManager):
        await manager.score(requests)
        return
    async with manager.scoring(requests) as scores:
        for request in requests:
            scores.begin(request)
        await scores.done()


def unscored(request: AsyncRolloutRequest) -> AsyncRolloutRequest:
    """Copy a request as it was before it was scored, where it can be scored.

    One that failed by its reward comes back as answered: how it had ended is not known any more.
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
    """Keep what was written down of bonuses and penalties: no scorer gives or takes them."""
    if new.reward is not None:
        names = {source.value for source in SHAPING}
        kept = {name: told for name, told in old.reward_extra_info.items() if name in names}
        new.reward_extra_info |= kept


def changes_table(changes: dict[str, Change]) -> Table:
    """Show what changed, a row for each data source."""
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
