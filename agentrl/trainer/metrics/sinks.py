"""Where the figures of a step go: the console, `metrics.jsonl`, TensorBoard.

A `Tracker` hands each step's flat metrics to its sinks. `read_metrics` reads the file back.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from agentrl.atomic_io import naming, written_whole
from agentrl.config.schema.run import TrainerConfig
from agentrl.errors import DataError, MissingExtraError
from agentrl.plugins.environment import install_command

logger = logging.getLogger(__name__)

NO_SIGNAL = "algorithm/zero_signal_groups_frac"
METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file in a run's folder."""


class Sink(Protocol):
    """One place that a step's figures go to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of one step."""
        ...

    def close(self) -> None:
        """Let go of what the sink holds."""
        ...


class Tracker:
    """Hand each step's figures to every sink.

    Example:
        >>> with open_tracker(config, resumed_step=None) as tracker:
        ...     tracker.log(1, {"critic/rewards/mean": 0.25})
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the figures of one step, all at once: each call is one line."""
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_tracker(
    config: TrainerConfig,
    *,
    resumed_step: int | None,
    total_steps: int = 0,
    console: Console | None = None,
) -> Tracker:
    """Open the sinks that `trainer.logger` names, under `trainer.default_local_dir`.

    Args:
        config: The trainer's section of the run file.
        resumed_step: Step of the checkpoint that the run goes on from; figures of later steps are
            dropped. None for a run from the start: earlier metrics are moved aside, not lost.
        total_steps: Of the whole run.
        console: Where the console's lines go; standard output by default.

    Raises:
        MissingExtraError: for `tensorboard` without its package.
        OSError: where the run's folder cannot be written.
    """
    folder = config.default_local_dir
    sinks: list[Sink] = []
    for name in dict.fromkeys(config.logger):
        match name:
            case "console":
                sinks.append(ConsoleSink(console or Console(), total_steps))
            case "jsonl":
                sinks.append(JsonlSink(folder / METRICS_FILE, resumed_step=resumed_step))
            case "tensorboard":
                sinks.append(TensorBoardSink(folder / "tensorboard", resumed_step=resumed_step))
    return Tracker(sinks)


# JSONL.


class MetricsLine(NamedTuple):
    """The figures of one step, as read back; what was not finite is NaN."""

    step: int
    metrics: dict[str, float]


class JsonlSink:
    """One flat JSON object a step, appended and flushed, so that a killed run keeps its lines.

    What is no finite number is written as null: the file is valid JSON throughout.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is None:
            move_metrics_aside(path)
        elif path.exists():
            _drop_lines_after(path, resumed_step)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. Raises an `OSError` that names the file where the disk is full."""
        line = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        with naming(self._path):
            if not self._path.exists():
                logger.warning("%s was deleted; a new one holds steps from %d on", self._path, step)
                self._file.close()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """Read a metrics file, line by line.

    A last line that was cut short (the run was killed while writing it) is passed over.

    Raises:
        DataError: naming the line that is no metrics.
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


def _drop_lines_after(path: Path, step: int) -> None:
    """Rewrite the file without the steps that the resumed run will take again."""
    kept = [
        line
        for number, line in enumerate(_whole_lines(path), start=1)
        if _parse_line(line, path, number).step <= step
    ]
    with written_whole(path) as draft:
        draft.write_text("".join(kept), encoding="utf-8")


def move_metrics_aside(path: Path) -> Path | None:
    """Keep the metrics of an earlier run in the same folder as `metrics.1.jsonl`, `.2`, ...

    Returns:
        Where they lie now; None where there were none.
    """
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


# TensorBoard.


class TensorBoardSink:
    """Scalars for TensorBoard; on resume, later steps of the earlier run are purged.

    They are for looking at: where the disk does not take them, that is told once, and the run goes
    on without.
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
        """Write each figure as a scalar."""
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
            logger.warning("no more figures for TensorBoard in %s: %s", self._folder, error)

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Hold back the traceback of the writer's own thread: its next call raises the same."""
        if not type(args.thread).__module__.startswith("tensorboard."):
            self._excepthook(args)


# The console.


class Column(NamedTuple):
    """One figure of the console's line: the first of `keys` that the step has."""

    title: str
    keys: tuple[str, ...]
    width: int
    form: str


REWARD_KEYS = (
    "rollout/combined_reward/mean", "rollout/reward/mean", "critic/score/mean",
    "critic/rewards/mean",
)  # fmt: skip
"""Where the training reward is looked for, in this order: the combined one, which is logged where
it may be another than the scorer's number, goes before that."""

COLUMNS = (
    Column("reward", REWARD_KEYS, 7, ".3f"),
    Column("val", ("val/*/success",), 6, ".3f"),
    Column("length", ("response_length/mean",), 7, ".1f"),
    Column("turns", ("num_turns/mean",), 6, ".2f"),
    Column("kl", ("actor/ppo_kl",), 9, ".1e"),
    Column("grad", ("actor/grad_norm",), 9, ".3g"),
    Column("tools", ("rollout/tool_calls/failed_frac",), 6, ".0%"),
    Column("scorer", ("rollout/failures/reward",), 7, ".0%"),
    Column("seconds", ("timing_s/step",), 8, ".1f"),
)
"""What the console shows of a step: docs/runs.md defines each column. `tools` and `scorer` are
shares that failed. Everything else is in `metrics.jsonl`."""

_STEP_WIDTH = 7
_LEFT_WIDTH = 7
_LINES_PER_HEADER = 25


class ConsoleSink:
    """One line a step with the figures that matter, in a table that reads as well in a log file.

    Args:
        console: Where the lines go.
        total_steps: Of the run, for `3/24` and the time that is left.
        clock: Seconds, from anywhere.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._total_steps = total_steps
        self._width = max(_STEP_WIDTH, 2 * len(str(total_steps)) + 2)
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._num_lines = 0
        self._num_silent = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, below a heading where one is due, and what goes with it.

        That is all validation sets, and where a row of steps without a learning signal begins and
        ends.
        """
        if self._num_lines % _LINES_PER_HEADER == 0:
            self._print(_header(self._width))
        self._print(self._step_line(step, metrics))
        self._num_lines += 1
        if len(_match(metrics, "val/*/success")) > 1:
            self._print(_validation_line(metrics))
        if has_no_signal(metrics):
            self._num_silent += 1
            if self._num_silent == 1:
                self._print(_note("no group had a learning signal: every advantage is 0"))
                if refused := _refused_calls(metrics):
                    self._print(_note(refused))
        else:
            if self._num_silent > 1:
                self._print(_note(f"a learning signal after {self._num_silent} steps without one"))
            self._num_silent = 0

    def _step_line(self, step: int, metrics: Mapping[str, float]) -> Text:
        place = f"{step}/{self._total_steps}" if self._total_steps else str(step)
        line = Text(f"{place:>{self._width}}")
        for column in COLUMNS:
            value = _first(metrics, column.keys)
            shown = "-" if value is None else format(value, column.form)
            style = "dim" if value is None else "" if math.isfinite(value) else "bold red"
            line.append(f"{shown:>{column.width}}", style=style)
        return line.append(f"{self._time_left(step):>{_LEFT_WIDTH}}")

    def _time_left(self, step: int) -> str:
        """Estimate the time to the last step from the steps since the first line."""
        now = self._clock()
        if self._first is None:
            self._first = step, now
        first, begun = self._first
        if step <= first:
            return "-"
        return in_short((now - begun) / (step - first) * max(0, self._total_steps - step))

    def close(self) -> None:
        """Nothing is held."""

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def _header(step_width: int) -> Text:
    titles = "".join(f"{column.title:>{column.width}}" for column in COLUMNS)
    return Text(f"{'step':>{step_width}}{titles}{'left':>{_LEFT_WIDTH}}", style="bold")


def in_short(seconds: float) -> str:
    """Write a time in its two largest units.

    Example:
        >>> [in_short(s) for s in (9, 61, 3700, 90000)]
        ['9s', '1m01s', '1h01m', '1d01h']
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{h}h{m:02}m"
    return f"{m}m{s:02}s" if minutes else f"{s}s"


def _validation_line(metrics: Mapping[str, float]) -> Text:
    sets = [
        f"{name.removeprefix('val/').removesuffix('/success')} {value:.3f}"
        for name, value in _match(metrics, "val/*/success")
    ]
    return Text(f"{'':>{_STEP_WIDTH}}  validation: {', '.join(sets)}", style="dim")


def _note(text: str) -> Text:
    return Text(f"{'':>{_STEP_WIDTH}}  {text}", style="yellow")


def _refused_calls(metrics: Mapping[str, float]) -> str:
    """Say which share of the tool calls was refused, if it is most of them."""
    calls = "rollout/tool_calls"
    total = metrics.get(f"{calls}/mean", 0.0)
    malformed, errors = (metrics.get(f"{calls}/{end}", 0.0) for end in ("malformed", "tool_error"))
    if 2 * (malformed + errors) <= total:
        return ""
    return f"tool calls: {malformed / total:.0%} malformed, {errors / total:.0%} with a ToolError"


def has_no_signal(metrics: Mapping[str, float]) -> bool:
    """Whether a step had no group that trains on anything."""
    return metrics.get(NO_SIGNAL) == 1


def _first(metrics: Mapping[str, float], keys: Sequence[str]) -> float | None:
    return next((value for key in keys for _, value in _match(metrics, key)), None)


def _match(metrics: Mapping[str, float], key: str) -> list[tuple[str, float]]:
    """Figures whose name is `key`, in which `*` stands for a validation set's name."""
    start, _, end = key.partition("*")
    if not end:
        return [(key, metrics[key])] if key in metrics else []
    return [(k, v) for k, v in metrics.items() if k.startswith(start) and k.endswith(end)]


class RunProgress:
    """Progress bars at the foot of a terminal; nothing at all where the output is no terminal.

    Give it the console of the `ConsoleSink`, so that its lines pass above the bars.

    Example:
        >>> with RunProgress(console) as progress, progress.task("train", total=60) as advance:
        ...     advance(1)
    """

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.is_dumb_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bars.stop()

    @contextmanager
    def task(self, name: str, *, total: int, completed: int = 0) -> Iterator[Callable[[int], None]]:
        """Show one bar during the block; the block advances it by calling what it is given."""
        bar = self._bars.add_task(name, total=total, completed=completed)
        try:
            yield lambda count: self._bars.advance(bar, count)
        finally:
            self._bars.remove_task(bar)
