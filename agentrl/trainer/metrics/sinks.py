"""Files that a step's metrics are written to: `metrics.jsonl` and TensorBoard's."""

import json
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from agentrl.atomic_io import atomic_file, naming_path
from agentrl.errors import DataError, MissingExtraError
from agentrl.plugins.environment import install_command

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file in a run's folder."""
ZERO_SIGNAL = "algorithm/zero_signal_groups_frac"
REWARD_KEYS = (
    "rollout/combined_reward/mean", "rollout/reward/mean", "critic/score/mean",
    "critic/rewards/mean",
)  # fmt: skip
"""Keys of the training reward; the first one that a step has is shown. The combined reward is
logged only if it may differ from the scorer's number."""


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        ...

    def close(self) -> None:
        """Release the sink's resources."""
        ...


class MetricsLine(NamedTuple):
    """The metrics of one step, read back; a number that was not finite is NaN."""

    step: int
    metrics: dict[str, float]


class JsonlSink:
    """Writes one flat JSON object per step and flushes it, so that a killed run keeps its lines.

    A number that is not finite is written as null, so every line is valid JSON.

    Args:
        path: The file.
        resumed_step: Step of the checkpoint that the run resumes from; later lines are dropped.
            None for a new run, which moves an earlier file to another name.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is None:
            move_metrics_aside(path)
        elif path.exists():
            # The resumed run repeats the later steps.
            kept = [
                line
                for number, line in enumerate(_whole_lines(path), start=1)
                if _parse_line(line, path, number).step <= resumed_step
            ]
            with atomic_file(path) as draft:
                draft.write_text("".join(kept), encoding="utf-8")
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            OSError: naming the file, for example if the disk is full.
        """
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: n if math.isfinite(n) else None for name, n in numbers.items()}
        with naming_path(self._path):
            if not self._path.exists():
                logger.warning("%s was deleted; a new file has the steps from %d", self._path, step)
                self._file.close()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(json.dumps({"step": step} | finite, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with naming_path(self._path):
            self._file.close()


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """Read a metrics file, line by line.

    An incomplete last line (the run was killed while it wrote) is ignored.

    Raises:
        DataError: naming the line that cannot be read.
    """
    for number, line in enumerate(_whole_lines(path), start=1):
        yield _parse_line(line, path, number)


def _whole_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from (line for line in file if line.endswith("\n"))


def _parse_line(line: str, path: Path, number: int) -> MetricsLine:
    try:
        values = json.loads(line)
        step = values.pop("step")
        metrics = {name: math.nan if v is None else float(v) for name, v in values.items()}
        return MetricsLine(int(step), metrics)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            "a damaged line of metrics",
            file=path,
            line=number,
            expected='one JSON object of numbers with a "step"',
        ) from error


def move_metrics_aside(path: Path) -> Path | None:
    """Rename the metrics of an earlier run to `metrics.1.jsonl`, `metrics.2.jsonl`, ...

    Returns:
        The new path; None if there is no file.
    """
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)


def has_no_signal(metrics: Mapping[str, float]) -> bool:
    """Return whether no group of a step has a learning signal."""
    return metrics.get(ZERO_SIGNAL) == 1


class TensorBoardSink:
    """Writes scalars for TensorBoard; on resume, later steps of the earlier run are purged.

    These files are only for viewing. If one cannot be written, the sink logs this once, and the
    run continues without it.
    """

    def __init__(self, folder: Path, *, resumed_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                "trainer.logger names tensorboard, whose package is not installed",
                install=install_command("tensorboard"),
            ) from error
        purge = None if resumed_step is None else resumed_step + 1
        self._folder = folder
        self._is_broken = False
        self._excepthook = threading.excepthook
        threading.excepthook = self._on_thread_error
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        if self._is_broken:
            return
        with self._ignoring_write_errors():
            for name, value in metrics.items():
                self._writer.add_scalar(name, float(value), step)
            self._writer.flush()

    def close(self) -> None:
        """Write what is left and close."""
        if not self._is_broken:
            with self._ignoring_write_errors():
                self._writer.close()
        threading.excepthook = self._excepthook

    @contextmanager
    def _ignoring_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._is_broken = True
            logger.warning("no more metrics for TensorBoard in %s: %s", self._folder, error)

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Suppress the traceback of the writer's thread: the writer's next call raises the same."""
        if not type(args.thread).__module__.startswith("tensorboard."):
            self._excepthook(args)
