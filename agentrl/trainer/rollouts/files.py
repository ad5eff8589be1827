"""Rollouts on disk: one JSON line for each trajectory, complete, versioned, read back exactly.

    rollouts/step_000010.jsonl.zst         training rollouts of step 10, and what training computed
                                           for their tokens in `step_000010.tokens.parquet`
                                           (`token_files.py`)
    rollouts/val_<set>_000010.jsonl.zst    validation rollouts of a set after step 10
    skipped/step_000010.jsonl.zst          rows for which an optimizer step of step 10 was skipped,
                                           or the rollouts of step 10 of which too many failed,
                                           which ended the run (of a set: `val_<set>_000010`)

Without `trainer.compress_rollouts`, names end with `.jsonl` (`line_files.py`).

A line holds the whole request and a summary that is derived from it:

    {"version": 1, "step": 10, "combined_reward": 1.2, "summary": {"num_turns": 3, ...},
     "request": {...}}

Values that JSON cannot hold are written in the nearest form: numbers that are not finite as
texts (`"NaN"`, `"-Infinity"`), arrays as lists, bytes as base64, images and videos
as entries that name their files (see `pictures.py`), other objects as their `str`.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic_core import PydanticSerializationError

from agentrl.atomic_io import atomic_file
from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.run import RunConfig
from agentrl.errors import AgentRLError, DataError
from agentrl.messages import restore_numbers, strict_json
from agentrl.protocol import DataProto
from agentrl.rewards import combine_rewards
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.metrics.trackers import TRACKERS, Generation
from agentrl.trainer.rollouts.digests import add_digest, add_weight_digest
from agentrl.trainer.rollouts.line_files import (
    COMPRESSED,
    LineReader,
    other_form,
    rollout_path,
    write_lines,
)  # fmt: skip
from agentrl.trainer.rollouts.pictures import PictureCollector, read_picture, write_pictures
from agentrl.trainer.rollouts.token_files import save_tokens, tabulate_tokens, token_path
from agentrl.trainer.rollouts.transcript import Decode
from agentrl.workers.distributed import World
from agentrl.workers.update import SkippedStep

LINE_VERSION = 1
"""Version of a line; the request in it has its own (`RECORD_VERSION`)."""
_SEPARATORS = (",", ":")
SKIPPED = "skipped"
"""Subfolder of the run's folder with the rows for which an optimizer step was skipped, and with the
rollouts of which too many failed, which ended the run."""
_MAX_SHOWN_CHARS = 20_000
"""Characters of a text in a tracker's table."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TrajectorySummary(_Record):
    """The most important facts of a trajectory, all derived from the request.

    Turns and calls are those of the request's counts. Response tokens are those of all sequences;
    `num_prompt_tokens` and `reward_index` are of the sequence in which the trajectory ended.
    """

    num_turns: int
    """Turns as the request counts them, the prompt included."""
    num_assistant_turns: int
    num_user_turns: int
    num_tool_calls: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_trained_tokens: int
    mask_ones_ratio: float
    """Fraction of the response that is trained; 0 for an empty response."""
    reward_index: int | None
    """Response token with the trajectory's reward under `placement: last_token`: the last trained
    one. None if no token is trained."""
    num_sequences: int = 1
    """Sequences of the trajectory: the request and its branches."""

    @classmethod
    def of(cls, request: AsyncRolloutRequest) -> Self:
        """Derive the summary of `request`."""
        mask = request.loss_mask if request.is_trained else [0] * request.num_response_tokens
        trained = [index for index, is_trained in enumerate(mask) if is_trained]
        num_tokens, num_trained = len(mask), len(trained)
        for one in request.branches:
            num_tokens += one.num_response_tokens
            num_trained += sum(one.loss_mask) if request.is_trained and one.is_trained else 0
        return cls(
            num_turns=request.num_turns,
            num_assistant_turns=request.num_assistant_turns,
            num_user_turns=request.num_user_turns,
            num_tool_calls=request.num_tool_calls,
            num_prompt_tokens=request.num_prompt_tokens,
            num_response_tokens=num_tokens,
            num_trained_tokens=num_trained,
            mask_ones_ratio=num_trained / num_tokens if num_tokens else 0.0,
            reward_index=trained[-1] if trained else None,
            num_sequences=len(request.sequences),
        )


class SkipNote(_Record):
    """The reason why a trajectory is in a file of `skipped/`."""

    mini_batch: int
    """Index of the skipped step in the update, counted over the epochs."""
    not_finite: dict[str, list[int]]
    """By quantity (`log_probs`, `advantages`, ...): the response tokens at which it was not finite.
    `loss` and `gradient` have no tokens: they are those of the row's micro-batch."""
    request_id: str | None = None
    """The sequence with these tokens; None in older files, of trajectories with one sequence."""


class SavedTrajectory(_Record):
    """One line of a rollout file, checked."""

    version: int
    """`LINE_VERSION` of the writer."""
    step: int
    combined_reward: float | None = None
    """The reward that training uses: the scorer's number with weights, bonuses and penalties. None
    in lines that `agentrl reward rescore` or an older version wrote."""
    summary: TrajectorySummary
    skipped: SkipNote | None = None
    """Set only in files of `skipped/`."""
    request: AsyncRolloutRequest

    @field_validator("version")
    @classmethod
    def _is_known(cls, version: int) -> int:
        if version != LINE_VERSION:
            raise ValueError(f"a rollout line of version {version}, not {LINE_VERSION}")
        return version

    @model_validator(mode="after")
    def _matches_its_summary(self) -> Self:
        if self.summary != TrajectorySummary.of(self.request):
            raise ValueError("the summary does not match the request")
        return self


def save_rollouts(
    path: Path,
    requests: Iterable[AsyncRolloutRequest],
    *,
    step: int,
    reward: RewardConfig | None = None,
) -> int:
    """Write trajectories, one line each, to a file that appears when it is complete.

    Their images and videos are written to the folder `media` next to it.

    Args:
        path: The file.
        requests: Finished requests.
        step: The run's step.
        reward: How rewards are combined; None to leave out the combined reward.

    Returns:
        The number of trajectories.

    Raises:
        OSError: naming `path`, if it cannot be written.
    """
    pictures = PictureCollector()
    return save_lines(path, (to_line(one, step, pictures, reward=reward) for one in requests))


class Line(NamedTuple):
    """A line of a file, and the pictures that it is the first to name."""

    text: str
    pictures: Mapping[str, bytes]
    """The content of each file by its path, relative to the folder of the rollout file."""


def save_lines(path: Path, lines: Iterable[Line]) -> int:
    """Write lines of `to_line` to a file that appears when it is complete, and their pictures.

    Returns:
        The number of lines.

    Raises:
        OSError: naming `path`, if it cannot be written.
    """
    count = 0

    def write_media() -> Iterator[str]:
        nonlocal count
        for line in lines:
            write_pictures(path.parent, line.pictures)
            count += 1
            yield line.text

    with atomic_file(path) as draft:
        write_lines(draft, write_media(), compressed=path.suffix == COMPRESSED)
    return count


def to_line(
    request: AsyncRolloutRequest,
    step: int,
    pictures: PictureCollector,
    note: SkipNote | None = None,
    *,
    reward: RewardConfig | None = None,
) -> Line:
    """Write a trajectory as one line.

    Args:
        request: A finished request.
        step: The run's step.
        pictures: Collects the files of the images and videos that the line names.
        note: Set for a row for which an optimizer step was skipped.
        reward: How rewards are combined; None to leave out the combined reward.
    """
    line: dict[str, object] = {"version": LINE_VERSION, "step": step}
    if reward is not None:
        line["combined_reward"] = combine_rewards(request, reward).total
    line["summary"] = TrajectorySummary.of(request).model_dump()
    if note is not None:
        line["skipped"] = note.model_dump()
    head = strict_json(json.dumps(line, ensure_ascii=False, separators=_SEPARATORS))
    return Line(f'{head[:-1]},"request":{_dump(request, pictures)}}}\n', pictures.take())


def _dump(request: AsyncRolloutRequest, pictures: PictureCollector) -> str:
    try:
        return strict_json(request.model_dump_json(fallback=pictures.plain))
    except PydanticSerializationError:  # a text with a lone surrogate
        plain = request.model_dump(mode="json", fallback=pictures.plain)
        return strict_json(json.dumps(plain, ensure_ascii=False, separators=_SEPARATORS))


def read_rollouts(path: Path) -> Iterator[AsyncRolloutRequest]:
    """Read requests as they were when they were saved: tokens, mask, turns, state and end.

    Raises:
        DataError: naming a line that is damaged or of another version.
    """
    return (trajectory.request for trajectory in read_trajectories(path))


def read_trajectories(path: Path) -> Iterator[SavedTrajectory]:
    """Read a rollout file line by line, with each line's step and summary.

    Raises:
        DataError: naming a line that is damaged or of another version.
    """
    if not path.is_file():
        raise DataError("no such rollout file", file=path)
    with LineReader(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                saved = SavedTrajectory.model_validate(json.loads(restore_numbers(line)))
            except (ValueError, LookupError, TypeError, RecursionError, AgentRLError) as error:
                raise DataError(
                    f"a rollout line that cannot be read: {_reason(error)}",
                    file=path,
                    line=number,
                    expected=f"a line of `save_rollouts`, version {LINE_VERSION}",
                ) from error
            for one in saved.request.sequences:
                one.multi_modal_data = {
                    kind: [read_picture(value, path.parent) for value in values]
                    for kind, values in one.multi_modal_data.items()
                }
            yield saved


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


class _RankLine(NamedTuple):
    """A line of a file; ranks send these to each other."""

    sort_key: tuple[int, int]
    """Sorts the lines of all ranks."""
    line: Line


class RolloutFiles:
    """Saves a run's rollouts, and gives some to trackers. Every method is a collective.

    Args:
        config: The folders, and how rewards are combined.
        world: The ranks; each has its own rollouts. The main rank writes.
        run_logger: Has the trackers, and reports what could not be written.
        decode: Decodes tokens for trackers.
    """

    def __init__(
        self, config: RunConfig, world: World, run_logger: RunLogger, decode: Decode
    ) -> None:
        self._config = config.trainer
        self._reward = config.reward
        self._world = world
        self._run_logger = run_logger
        self._pictures: defaultdict[Path, PictureCollector] = defaultdict(PictureCollector)
        self._decode = decode

    def save_step(
        self, step: int, requests: Sequence[AsyncRolloutRequest], batch: DataProto
    ) -> None:
        """Save training rollouts, if `trainer.rollout_data_dir` names a folder.

        Args:
            step: The run's step.
            requests: This rank's samples, also those that are not in the batch.
            batch: The rows after the update.
        """
        config = self._config
        self._save_all(config.rollout_data_dir, requests, step, "step")
        if config.rollout_data_dir is not None:
            tables = self._world.gather_on_main([tabulate_tokens(batch, step)])
            if self._world.is_main:
                path = token_path(rollout_path(config.rollout_data_dir, step))
                with self._run_logger.ignoring_write_errors("tokens", step):
                    save_tokens(path, tables)
                    add_digest(path, step)
        self._show(step, "rollout/generations", requests, config.log_train_generations)

    def save_weights(self, step: int, digest: str | None) -> None:
        """Add the digest of the policy's weights after a step to the digests of its files."""
        folder = self._config.rollout_data_dir
        if digest is not None and folder is not None and self._world.is_main:
            with self._run_logger.ignoring_write_errors("digests of the weights", step):
                add_weight_digest(folder, step, digest)

    def save_validation(
        self, step: int, requests: Sequence[AsyncRolloutRequest], name: str
    ) -> None:
        """Save a set's rollouts, if `trainer.validation_data_dir` names a folder."""
        config = self._config
        self._save_all(config.validation_data_dir, requests, step, f"val_{name}")
        self._show(step, f"val/{name}/generations", requests, config.log_val_generations)

    def save_skipped(
        self, step: int, requests: Sequence[AsyncRolloutRequest], skipped: Sequence[SkippedStep]
    ) -> None:
        """Report skipped optimizer steps, and save the rows that caused them."""
        if not skipped:
            return
        path = self._path(self._config.default_local_dir / SKIPPED, step)
        own = {one.request_id: request for request in requests for one in request.sequences}
        lines: list[_RankLine] = []
        for index, one in enumerate(skipped):
            self._run_logger.info(f"step {step}: {one.describe()}; the rows to blame: {path}")
            for number, row in enumerate(one.rows):
                if row.request_id in own:
                    tokens = {name: list(at) for name, at in row.not_finite.items()}
                    note = SkipNote(
                        mini_batch=one.mini_batch, not_finite=tokens, request_id=row.request_id
                    )
                    request = own[row.request_id]
                    lines.append(self._line(path, (index, number), request, step, note))
        self._save(path, lines, step, "rows to blame")

    def save_refused(self, step: int, requests: Sequence[AsyncRolloutRequest], plan: str) -> None:
        """Save the rollouts of which too many failed, before they end the run. A collective.

        Args:
            step: The run's step.
            requests: This rank's requests.
            plan: The name of their `SamplingPlan`.
        """
        kind = f"val_{plan.removeprefix('val-')}" if plan.startswith("val-") else "step"
        folder = self._config.default_local_dir / SKIPPED
        self._save_all(folder, requests, step, kind)
        path = self._path(folder, step, kind)
        self._run_logger.info(f"the rollouts that end the run: {path}")

    def _save_all(
        self, folder: Path | None, requests: Sequence[AsyncRolloutRequest], step: int, kind: str
    ) -> None:
        if folder is None:
            return
        path = self._path(folder, step, kind)
        lines = [
            self._line(path, (one.batch_data_id, one.rollout_offset), one, step) for one in requests
        ]
        self._save(path, lines, step, "rollouts")

    def _path(self, folder: Path, step: int, kind: str = "step") -> Path:
        return rollout_path(folder, step, kind, compressed=self._config.compress_rollouts)

    def _line(
        self,
        path: Path,
        sort_key: tuple[int, int],
        request: AsyncRolloutRequest,
        step: int,
        note: SkipNote | None = None,
    ) -> _RankLine:
        pictures = self._pictures[path.parent]
        return _RankLine(sort_key, to_line(request, step, pictures, note, reward=self._reward))

    def _show(
        self, step: int, name: str, requests: Sequence[AsyncRolloutRequest], limit: int
    ) -> None:
        """Give trackers the first sample of each of the first prompts; then the second ones."""
        if not limit or not set(TRACKERS) & set(self._config.logger):
            return
        in_order = sorted(requests, key=lambda one: (one.rollout_offset, one.batch_data_id))
        rows = [
            Generation(
                sample=one.rollout_offset,
                row=one.batch_data_id,
                prompt=_shortened(self._decode(one.prompt_ids)),
                response=_shortened(self._decode(one.response_ids)),
                reward=combine_rewards(one, self._reward).total,
                stop_reason=str(one.stop_reason),
            )
            for one in in_order[:limit]
        ]
        gathered = sorted(self._world.gather_on_main(rows))
        self._run_logger.log_generations(step, name, gathered[:limit])

    def _save(self, path: Path, lines: Sequence[_RankLine], step: int, what: str) -> None:
        gathered = sorted(self._world.gather_on_main(lines), key=lambda one: one.sort_key)
        if self._world.is_main:
            with self._run_logger.ignoring_write_errors(what, step):
                save_lines(path, (one.line for one in gathered))
                other_form(path).unlink(missing_ok=True)  # of a start with another setting
                add_digest(path, step)


def _shortened(text: str) -> str:
    """Replace the middle of a long text by the number of its characters."""
    left_out = len(text) - _MAX_SHOWN_CHARS
    if left_out <= 0:
        return text
    half = _MAX_SHOWN_CHARS // 2
    return f"{text[:half]} [{left_out} characters left out] {text[-half:]}"
