"""The output of a run: lines, progress, metrics, and the learning curve at the end."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from agentrl.atomic_io import remove_drafts
from agentrl.config.schema.run import TrainerConfig
from agentrl.errors import DataError
from agentrl.progress import ProgressDisplay
from agentrl.remote_io import locate
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState
from agentrl.trainer.metrics.alerts import Alerts
from agentrl.trainer.metrics.console import ConsoleSink
from agentrl.trainer.metrics.curve import plot_curve
from agentrl.trainer.metrics.sinks import METRICS_FILE, JsonlSink, Sink, TensorBoardSink
from agentrl.trainer.metrics.tracker_process import TrackedRun
from agentrl.trainer.metrics.trackers import CLOSE_S, Generation, TrackerSink
from agentrl.trainer.state.run_folder import RunLock
from agentrl.workers.rank_status import RankStatus

LONG_CLOSE_S = 2.0
"""Seconds of waiting for trackers after which a line names them."""


class RunLogger:
    """Prints lines and progress, and logs metrics. Only the main rank prints and writes.

    Args:
        config: The run's folder and the sinks of its metrics.
        is_main: Whether this is the main rank.
        console: The console to print to; standard output by default.
    """

    def __init__(
        self, config: TrainerConfig, *, is_main: bool = True, console: Console | None = None
    ) -> None:
        self._config = config
        self._is_main = is_main
        is_live = config.progress == "live" or None
        self.console = console or Console(highlight=False, force_terminal=is_live)
        self.progress = ProgressDisplay(self.console, config.progress if is_main else "off")
        self._sinks: list[Sink] = []
        self._status: RankStatus | None = None
        self._lock = RunLock(config.default_local_dir)
        self._alerts = Alerts(config.alerts, config.default_local_dir)
        self._written: defaultdict[str, set[int | None]] = defaultdict(set)
        self._unwritten: dict[str, dict[int, Exception]] = {}
        """Steps without a file, by what was to be written."""

    def lock_folder(self) -> None:
        """Lock the run's folder until `close`; the main rank does so for all ranks.

        Raises:
            ConfigError: if another run uses the folder.
        """
        if self._is_main:
            self._lock.take()

    def open(self, *, start: Path, resumed_step: int | None, total_steps: int = 0) -> None:
        """Open `metrics.jsonl` and what `trainer.logger` names, and remove incomplete files.

        Args:
            start: Folder with the record of this start of the run, for trackers.
            resumed_step: Step of the checkpoint that the run resumes from; metrics of later steps
                are dropped. None for a new run: metrics of an earlier run are renamed.
            total_steps: Steps of the whole run.

        Raises:
            MissingExtraError: for `tensorboard` without its package; `check_run` checks trackers.
            DataError: if the metrics of the run that resumes are damaged.
            OSError: if the run's folder cannot be written.
        """
        if not self._is_main:
            return
        config, run = self._config, self._config.default_local_dir
        metrics = run / METRICS_FILE
        for folder in (run, config.rollout_data_dir, config.validation_data_dir):
            if folder is not None:
                remove_drafts(folder)
        for name in dict.fromkeys(["jsonl", *config.logger]):
            match name:
                case "console":
                    self._sinks.append(ConsoleSink(self.console, total_steps))
                case "jsonl":  # always: viewer, `status` and `audit` read it
                    self._sinks.append(JsonlSink(metrics, resumed_step=resumed_step))
                case "tensorboard":
                    folder = run / "tensorboard"
                    self._sinks.append(TensorBoardSink(folder, resumed_step=resumed_step))
                case tracker:
                    saved = locate(config.default_remote_dir or run)
                    tracked = TrackedRun(
                        tracker=tracker,
                        project=config.project_name,
                        experiment=config.experiment_name,
                        folder=str(run),
                        start=str(start),
                        record=str(saved / "trackers" / f"{tracker}.json"),
                        is_resumed=resumed_step is not None,
                    )
                    self._sinks.append(TrackerSink(tracked, self.info))
        if resumed_step is not None:
            self._alerts.replay(metrics, resumed_step)

    def info(self, *lines: str) -> None:
        """Print lines."""
        for line in lines if self._is_main else ():
            self.console.print(line, markup=False, soft_wrap=True)

    def notes(self, notes: Iterable[str]) -> None:
        """Print notes for the user."""
        self.info(*(f"note: {note}" for note in notes))

    def track(self, step: int, metrics: Mapping[str, float], *, is_complete: bool = True) -> None:
        """Log the metrics of one step to every sink, and warn of what is wrong with them.

        Args:
            step: Its number.
            metrics: By name.
            is_complete: False if the run stops before the validation of the step: trackers, which
                keep the first row of a step, get the row of the resumed run.
        """
        for sink in self._sinks:
            if is_complete or not isinstance(sink, TrackerSink):
                sink.log(step, metrics)
        if self._is_main:
            self.info(*self._alerts.check(step, metrics))

    def log_generations(self, step: int, name: str, rows: Sequence[Generation]) -> None:
        """Give a table of rollouts to every tracker, before the metrics of the step."""
        for sink in self._sinks:
            if isinstance(sink, TrackerSink):
                sink.log_generations(step, name, rows)

    @contextmanager
    def requests_bar(
        self, name: str, num_requests: int
    ) -> Iterator[Callable[[AsyncRolloutRequest], None]]:
        """Show how many requests have ended or failed during a `with` block.

        Yields:
            A function that counts a request that has ended.
        """

        def count(request: AsyncRolloutRequest) -> None:
            failed = int(request.state is RequestState.FAILED)
            advance(failed=failed, tokens=request.num_response_tokens)

        with self.progress.bar(name, num_requests) as advance:
            yield count

    def show_stages(self, status: RankStatus) -> None:
        """Show what this rank does in the progress display, and let its work report to it."""
        self._status = status
        self.progress.stage = lambda: status.stage
        status.progress = self.progress

    @contextmanager
    def ignoring_write_errors(self, what: str, step: int | None = None) -> Iterator[None]:
        """Print an error of writing files that are only for viewing, and continue.

        Args:
            what: What is written.
            step: Of files that each step writes: of all of these, only the first error is
                printed, and `close` prints the numbers of steps.
        """
        self._written[what].add(step)
        try:
            yield
        except (OSError, DataError) as error:
            if step is None or not self._unwritten:
                self.info(f"warning: {what} not written: {error}")
            if step is not None:
                self._unwritten.setdefault(what, {})[step] = error

    def plot(self) -> None:
        """Draw the learning curve, if there are metrics."""
        config, folder = self._config, self._config.default_local_dir
        metrics, title = folder / METRICS_FILE, f"{config.project_name} / {config.experiment_name}"
        if not (self._is_main and config.plot and metrics.is_file()):
            return
        try:
            with self.ignoring_write_errors("the learning curve"):
                plot_curve(metrics, folder / "curve.png", title=title)
        except DataError as error:
            self.info(f"no learning curve: {error}")

    def close(self) -> None:
        """Close what was opened; may be called twice."""
        for what, errors in self._unwritten.items():
            *_, error = errors.values()
            reason = str(getattr(error, "strerror", None) or error).removeprefix("cannot write: ")
            of = f"{len(errors)} of {len(self._written[what])} steps"
            self.info(f"warning: {what} of {of} were not written: {reason}")
        self._unwritten.clear()
        sinks, self._sinks = self._sinks, []
        with ExitStack() as stack:  # one that cannot be closed does not keep others open
            stack.callback(self._lock.release)
            for sink in reversed(sinks):
                stack.callback(sink.close)
            self._end([sink for sink in sinks if isinstance(sink, TrackerSink)])

    def _end(self, trackers: Sequence[TrackerSink]) -> None:
        """Let the trackers finish at the same time, and report which ones take long."""
        for tracker in trackers:
            tracker.end()
        until = time.monotonic() + LONG_CLOSE_S
        slow = [one.name for one in trackers if not one.is_finished(until - time.monotonic())]
        if slow:
            self.info(f"waiting for {', '.join(slow)} (at most {CLOSE_S:g} s)")
            if self._status is not None:
                self._status.enter("waiting for trackers")
