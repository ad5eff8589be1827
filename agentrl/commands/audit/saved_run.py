"""Read what a run saved: its starts, metrics, digests and rollout files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import yaml

from agentrl.config import RunConfig, parse_config
from agentrl.errors import AgentRLError, DataError
from agentrl.remote_io import Location
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.metrics.sinks import METRICS_FILE, read_metrics
from agentrl.trainer.rollouts.files import SavedTrajectory, read_trajectories
from agentrl.trainer.rollouts.line_files import RolloutFile, find_rollout_files
from agentrl.trainer.rollouts.token_files import read_tokens, token_path
from agentrl.trainer.state.resume import checkpoint_folder
from agentrl.trainer.state.run_folder import ABOUT, RESOLVED, STARTS, find_starts, move_paths
from agentrl.workers.checkpoint import newest_first

TOLERANCE = 1e-5
"""Largest difference, absolute plus relative, of two numbers that count as equal."""
TRAIN = "step"
"""Kind of a file of training rollouts."""
VAL = "val_"
"""Start of the kind of a file of validation rollouts; the name of the set follows."""
_ODD_CONTENT = (LookupError, TypeError, ValueError, OSError, RuntimeError, pa.ArrowException)
"""Errors of reading or computing from content that no run wrote."""


@dataclass
class Check:
    """One kind of check, over all steps."""

    name: str
    what: str
    num: int = 0
    """How many things were compared."""
    differences: list[AgentRLError] = field(default_factory=list[AgentRLError])
    num_left_out: int = 0
    """How many things could not be compared."""
    not_done: str = ""
    """Why the check, or a part of it, was not done."""

    @contextmanager
    def collecting(self, file: Location | None = None) -> Iterator[None]:
        """Collect a difference that the block raises. The rest of the block is not run.

        An error that a changed file causes is a difference too, so the other checks are run.

        Args:
            file: The file that the block checks, for such an error.
        """
        try:
            yield
        except AgentRLError as error:
            self.differences.append(error)
        except _ODD_CONTENT as error:
            message = f"cannot be checked: {type(error).__name__}: {error}"
            self.differences.append(DataError(message, file=file))

    def compare_metrics(
        self, step: int, logged: Mapping[str, float], found: Mapping[str, float]
    ) -> None:
        """Compare values with those of the same names that the run logged.

        Raises:
            DataError: For the first one that differs.
        """
        for name, value in found.items():
            if name not in logged:
                continue
            self.num += 1
            if not is_close(value, logged[name]):
                raise DataError(
                    f"{name} does not follow from the rows",
                    step=step, saved=logged[name], expected=value,
                )  # fmt: skip


class Start(NamedTuple):
    """A start of a run."""

    config: RunConfig
    resumed_step: int | None
    """The step that it continued from; None: an older version did not record it."""
    records_weights: bool
    """Whether it recorded digests of weights."""


@dataclass(frozen=True)
class Step:
    """Saved rollouts of one step: of training, or of a validation set after it."""

    file: RolloutFile
    saved: Sequence[SavedTrajectory]
    metrics: Mapping[str, float]
    config: RunConfig

    @property
    def number(self) -> int:
        """Number of the step."""
        return self.file.step

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    @property
    def requests(self) -> list[AsyncRolloutRequest]:
        """The requests in the order of the file."""
        return [one.request for one in self.saved]

    @property
    def sampled(self) -> list[AsyncRolloutRequest]:
        """The training samples: all but the greedy rollouts of their prompts."""
        return [one for one in self.requests if one.sampling.temperature != 0]

    @cached_property
    def tokens(self) -> pa.Table:
        """The rows of the step's batch."""
        return read_tokens(token_path(self.path))


@dataclass(frozen=True)
class SavedRun:
    """What a run saved. Its folder may be a copy, or may have been moved.

    Args:
        folder: `trainer.default_local_dir`.
        starts: The starts of the run, in order.
    """

    folder: Path
    starts: Sequence[Start]

    @property
    def config(self) -> RunConfig:
        """The configuration of the last start."""
        return self.starts[-1].config

    @property
    def rollouts(self) -> Path:
        """The last folder of training rollouts.

        Raises:
            DataError: If the run saved none.
        """
        for start in reversed(self.starts):
            if (folder := start.config.trainer.rollout_data_dir) is not None:
                return folder
        raise DataError(
            "the run saved no training rollouts",
            file=self.folder,
            expected="a run with trainer.rollout_data_dir",
        )

    @property
    def folders(self) -> list[Path]:
        """The folders of rollouts of all starts, in their order; each once."""
        found = dict[Path, Path]()
        for start in self.starts:
            trainer = start.config.trainer
            for folder in (trainer.rollout_data_dir, trainer.validation_data_dir):
                if folder is not None:
                    found.setdefault(folder.resolve(), folder)
        return list(found.values())

    @cached_property
    def files(self) -> list[RolloutFile]:
        """The rollout files without those that a later start repeats; first training, by step."""
        found = (file for folder in self.folders for file in find_rollout_files(folder))
        return sorted(
            filter(self.is_current, found), key=lambda one: (one.kind != TRAIN, one.step, one.kind)
        )

    @cached_property
    def logged(self) -> dict[int, Mapping[str, float]]:
        """Metrics by step."""
        return {one.step: one.metrics for one in read_metrics(self.folder / METRICS_FILE)}

    @property
    def training_steps(self) -> list[int]:
        """The training steps that were logged, in order."""
        logged = self.logged.items()
        return sorted(step for step, metrics in logged if "rollout/num_requests" in metrics)

    @cached_property
    def checkpoints(self) -> dict[int, Location]:
        """The checkpoints by step."""
        is_local = self.config.trainer.default_remote_dir is None
        folder = self.folder / "checkpoints" if is_local else checkpoint_folder(self.config)
        return dict(newest_first(folder))

    def start_of(self, step: int) -> Start:
        """Return the start that took a step: a later start repeats what it did not resume from."""
        for start in reversed(self.starts):
            if start.resumed_step is None or start.resumed_step < step:
                return start
        return self.starts[0]

    def is_current(self, file: RolloutFile) -> bool:
        """Return whether a file is in the folder of the start that took its step.

        A start with another folder repeats the steps after the one that it resumed from.
        """
        return self.folder_of(file.step, file.kind) == file.path.parent.resolve()

    def folder_of(self, step: int, kind: str) -> Path | None:
        """Return the folder of the files of a kind of the start that took a step, resolved."""
        trainer = self.start_of(max(step, 1)).config.trainer
        folder = trainer.rollout_data_dir if kind == TRAIN else trainer.validation_data_dir
        return None if folder is None else folder.resolve()

    def is_complete(self, file: RolloutFile) -> bool:
        """Return whether the run logged the step of a file, or a later one.

        A run that was killed or interrupted may have saved rollouts of one step more.
        """
        return file.step <= max(self.logged, default=-1)

    def read(self, file: RolloutFile) -> Step:
        """Read a file.

        Raises:
            DataError: If it cannot be read, or its step was not logged.
        """
        if file.step not in self.logged:
            raise DataError("the step has no metrics", file=file.path)
        config = self.start_of(max(file.step, 1)).config
        saved = list(read_trajectories(file.path))
        return Step(file, saved, self.logged[file.step], config)


def read_run(folder: Path) -> SavedRun:
    """Read the starts of the run in a folder.

    Raises:
        DataError: If there is no record of a start, or there are no metrics.
    """
    starts = [one for one in find_starts(folder) if (one / ABOUT).is_file()]  # written last
    if not starts:
        raise DataError(
            "no record of a start of a run",
            file=folder / STARTS,
            expected="the folder of a run (trainer.default_local_dir)",
        )
    if not (folder / METRICS_FILE).is_file():
        raise DataError(
            "the run has no metrics",
            file=folder / METRICS_FILE,
            expected="a run whose trainer.logger has jsonl",
        )
    return SavedRun(folder, [_read_start(one, folder) for one in starts])


def _read_start(start: Path, run: Path) -> Start:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        content = yaml.load((start / RESOLVED).read_bytes(), loader)
        about = json.loads((start / ABOUT).read_text(encoding="utf-8"))
        trainer = content["trainer"]
        content = move_paths(content, run)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise DataError(f"the record of a start cannot be read: {error}", file=start) from error
    return Start(
        parse_config(content),
        about.get("resumed_step"),
        bool(trainer.get("weight_digests") and trainer["rollout_data_dir"]),
    )


def is_close(one: float, other: float) -> bool:
    """Return whether two numbers count as equal."""
    return bool(np.isclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
