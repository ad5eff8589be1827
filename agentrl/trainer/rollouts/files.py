"""Rollouts on disk: one JSON line for each trajectory, complete, versioned, read back exactly.

    rollouts/step_000010.jsonl    training rollouts of step 10
    rollouts/val_000010.jsonl     validation rollouts after step 10 (`val_<set>_...` by set)
    skipped/step_000010.jsonl     rows for which an optimizer step of step 10 was skipped

A line holds the whole request and a summary of what can be derived from it:

    {"version": 1, "step": 10, "combined_reward": 1.2, "summary": {"num_turns": 3, ...},
     "request": {...}}

What JSON cannot hold is written as the nearest that it can: numbers that are not finite as Python's
`json` writes them (`NaN`, `Infinity`), arrays as lists, bytes as base64, other objects as their
`str`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from agentrl.atomic_io import written_whole
from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.run import RunConfig
from agentrl.errors import AgentRLError, DataError
from agentrl.rewards import combine_rewards
from agentrl.rollout.records import to_plain
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.workers.actor import BrokenRow, SkippedStep
from agentrl.workers.distributed import World

_FILE = re.compile(r"(?:step|val|val_.+)_(\d{6,})\.jsonl")

LINE_VERSION = 1
"""Version of a line; the request in it has its own (`RECORD_VERSION`)."""


class TrajectorySummary(BaseModel):
    """What one looks for first in a trajectory. All of it follows from the request."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_turns: int
    """Counted as the request does, the prompt included."""
    num_assistant_turns: int
    num_user_turns: int
    num_tool_calls: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_trained_tokens: int
    mask_ones_ratio: float
    """Share of the response that is trained; 0 for an empty one."""
    reward_index: int | None
    """Response token on which the trajectory's reward sits under `placement: last_token`: the last
    trained one. None where nothing is trained."""

    @classmethod
    def of(cls, request: AsyncRolloutRequest) -> Self:
        """Derive the summary of `request`."""
        mask = request.loss_mask if request.is_trained else [0] * request.num_response_tokens
        trained = [index for index, is_trained in enumerate(mask) if is_trained]
        return cls(
            num_turns=request.num_turns,
            num_assistant_turns=request.num_assistant_turns,
            num_user_turns=request.num_user_turns,
            num_tool_calls=request.num_tool_calls,
            num_prompt_tokens=request.num_prompt_tokens,
            num_response_tokens=len(mask),
            num_trained_tokens=len(trained),
            mask_ones_ratio=len(trained) / len(mask) if mask else 0.0,
            reward_index=trained[-1] if trained else None,
        )


class SkipNote(BaseModel):
    """Why a trajectory stands in a file of rows for which an optimizer step was skipped."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    mini_batch: int
    """The step's place in the update, counted over the epochs."""
    not_finite: dict[str, list[int]]
    """By quantity (`log_probs`, `advantages`, ...): the response tokens at which it was not finite.
    `loss` and `gradient`: no number of the row itself, but those of the micro-batch it was in;
    no tokens then."""


class SavedTrajectory(BaseModel):
    """One line of a rollout file, checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: int
    """`LINE_VERSION` of what wrote the line."""
    step: int
    combined_reward: float | None = None
    """The reward that training uses: the scorer's number with weights, bonuses and penalties. None
    in lines that `agentrl reward rescore` or an older version wrote."""
    summary: TrajectorySummary
    skipped: SkipNote | None = None
    """In `skipped/` alone."""
    request: AsyncRolloutRequest

    @field_validator("version")
    @classmethod
    def _is_known(cls, version: int) -> int:
        if version != LINE_VERSION:
            raise ValueError(f"a rollout line of version {version}, not {LINE_VERSION}")
        return version

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.summary != TrajectorySummary.of(self.request):
            raise ValueError("a summary of another request")
        return self


def rollout_path(folder: Path, step: int, kind: str = "step") -> Path:
    """Name the file of one step's rollouts; `kind` is `step` (training), `val` or `val_<set>`.

    Example:
        >>> rollout_path(Path("rollouts"), 10, "val").as_posix()
        'rollouts/val_000010.jsonl'
    """
    return folder / f"{kind}_{step:06d}.jsonl"


def find_rollouts(folder: Path, *, after: int) -> list[Path]:
    """Find the files of later steps than `after`, by name; none where there is no such folder."""
    found = ((path, _FILE.fullmatch(path.name)) for path in sorted(folder.glob("*.jsonl")))
    return [path for path, match in found if match and int(match.group(1)) > after]


def save_rollouts(
    path: Path,
    requests: Iterable[AsyncRolloutRequest],
    *,
    step: int,
    reward: RewardConfig | None = None,
) -> int:
    """Write trajectories as they come, one line each; the file appears when it is whole.

    Args:
        path: The file.
        requests: Finished.
        step: Of the run.
        reward: How the combined reward is made; None: it is not written.

    Returns:
        How many were written.

    Raises:
        OSError: naming `path`, where the disk does not take it.
    """
    return save_lines(path, (to_line(request, step, reward=reward) for request in requests))


def save_lines(path: Path, lines: Iterable[str]) -> int:
    """Write lines of `to_line`; the file appears when it is whole.

    Returns:
        How many were written.

    Raises:
        OSError: naming `path`, where the disk does not take it.
    """
    count = 0
    # A lone surrogate, which UTF-8 cannot hold, becomes the JSON escape of itself.
    with (
        written_whole(path) as draft,
        draft.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        for line in lines:
            file.write(line)
            count += 1
    return count


def to_line(
    request: AsyncRolloutRequest,
    step: int,
    note: SkipNote | None = None,
    *,
    reward: RewardConfig | None = None,
) -> str:
    """Write a trajectory as one line.

    Args:
        request: Finished.
        step: Of the run.
        note: Of a row for which an optimizer step was skipped.
        reward: How the combined reward is made; None: it is not written.
    """
    combined = None if reward is None else combine_rewards(request, reward).total
    line = {
        "version": LINE_VERSION,
        "step": step,
        **({} if combined is None else {"combined_reward": combined}),
        "summary": TrajectorySummary.of(request).model_dump(),
        **({} if note is None else {"skipped": note.model_dump()}),
        "request": request.model_dump(mode="json", fallback=to_plain),
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


def read_rollouts(path: Path) -> Iterator[AsyncRolloutRequest]:
    """Read requests back as they were when saved: tokens, mask, turns, state and end.

    Raises:
        DataError: naming the line that is damaged or of another version.
    """
    return (trajectory.request for trajectory in read_trajectories(path))


def read_trajectories(path: Path) -> Iterator[SavedTrajectory]:
    """Read a rollout file line by line, with each line's step and summary.

    Raises:
        DataError: naming the line that is damaged or of another version.
    """
    if not path.is_file():
        raise DataError("no such rollout file", file=path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _parse(line, path, number)


def _parse(line: bytes, path: Path, number: int) -> SavedTrajectory:
    try:
        return SavedTrajectory.model_validate(json.loads(line))
    except ValidationError as error:
        raise _damaged(path, number, _reason(error)) from error
    except (ValueError, LookupError, TypeError, RecursionError, AgentRLError) as error:
        raise _damaged(path, number, f"{type(error).__name__}: {error}") from error


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def _damaged(path: Path, number: int, reason: str) -> DataError:
    return DataError(
        f"a rollout line that cannot be read: {reason}",
        file=path,
        line=number,
        expected=f"one trajectory as `save_rollouts` of version {LINE_VERSION} writes it",
    )


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
        run_logger: Told what could not be written.
    """

    def __init__(self, config: RunConfig, world: World, run_logger: RunLogger) -> None:
        self._config = config.trainer
        self._reward = config.reward
        self._world = world
        self._run_logger = run_logger

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
            self._run_logger.info(f"step {step}: {one.in_words()}; the rows to blame: {path}")
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
            with self._run_logger.ignoring_write_errors(what):
                save_lines(path, (line.text for line in everyone))


def _note(step: SkippedStep, row: BrokenRow) -> SkipNote:
    tokens = {name: list(places) for name, places in row.not_finite.items()}
    return SkipNote(mini_batch=step.mini_batch, not_finite=tokens)
