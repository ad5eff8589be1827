"""Which rollouts of a run are written, where, and what becomes of the run if they cannot be.

They are for looking at: a full disk is told, and does not end the run. Ranks send each other lines
of JSON, not requests: what a scorer or tool left in one need not be fit to be sent.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from agentrl.config.schema import RunConfig
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.journal import Journal
from agentrl.trainer.rollout_log import SkipNote, rollout_path, save_lines, to_line
from agentrl.workers.actor import BrokenRow, SkippedStep
from agentrl.workers.distributed import World

SKIPPED = "skipped"
"""Folder, in the run's, of the rows for which an optimizer step was skipped."""


class _Line(NamedTuple):
    """A line of a file; what ranks send each other."""

    place: tuple[int, int]
    """By which the lines of all ranks are put in order."""
    text: str


class RolloutFiles:
    """Saves a run's rollouts. Every method is a collective; the main rank writes.

    Args:
        config: Which folders, and how rewards combine.
        world: The ranks, each with rollouts of its own.
        journal: Told what could not be written.
    """

    def __init__(self, config: RunConfig, world: World, journal: Journal) -> None:
        self._config = config.trainer
        self._reward = config.reward
        self._world = world
        self._journal = journal

    def save_step(self, step: int, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Save training rollouts, where `trainer.rollout_data_dir` names a folder."""
        if self._config.rollout_data_dir is not None:
            self._save_all(rollout_path(self._config.rollout_data_dir, step), requests, step)

    def save_validation(
        self, step: int, requests: Sequence[AsyncRolloutRequest], name: str
    ) -> None:
        """Save a set's rollouts, where `trainer.validation_data_dir` names a folder."""
        folder = self._config.validation_data_dir
        if folder is not None:
            self._save_all(rollout_path(folder, step, f"val_{name}"), requests, step)

    def save_skipped(
        self, step: int, requests: Sequence[AsyncRolloutRequest], skipped: Sequence[SkippedStep]
    ) -> None:
        """Tell of optimizer steps that were not taken, and save the rows that are to blame."""
        if not skipped:
            return
        path = rollout_path(self._config.default_local_dir / SKIPPED, step)
        own = {one.request_id: one for one in requests}
        lines = [
            _Line((place, number), self._line(own[row.request_id], step, _note(one, row)))
            for place, one in enumerate(skipped)
            for number, row in enumerate(one.rows)
            if row.request_id in own
        ]
        for one in skipped:
            self._journal.say(f"step {step}: {one.in_words()}; the rows to blame: {path}")
        self._save(path, lines, "the rows to blame")

    def _save_all(self, path: Path, requests: Sequence[AsyncRolloutRequest], step: int) -> None:
        lines = [
            _Line((one.batch_data_id, one.rollout_offset), self._line(one, step))
            for one in requests
        ]
        self._save(path, lines, "rollouts")

    def _line(self, one: AsyncRolloutRequest, step: int, note: SkipNote | None = None) -> str:
        return to_line(one, step, note, reward=self._reward)

    def _save(self, path: Path, lines: Sequence[_Line], what: str) -> None:
        everyone = sorted(self._world.gather_on_main(lines))
        if self._world.is_main:
            with self._journal.sparing(what):
                save_lines(path, (line.text for line in everyone))


def _note(step: SkippedStep, row: BrokenRow) -> SkipNote:
    tokens = {name: list(places) for name, places in row.not_finite.items()}
    return SkipNote(mini_batch=step.mini_batch, not_finite=tokens)
