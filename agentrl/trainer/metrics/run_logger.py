"""What a run tells of itself while it runs: lines, bars, figures, and the curve at the end."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from agentrl.atomic_io import remove_drafts
from agentrl.config.schema.run import TrainerConfig
from agentrl.errors import DataError
from agentrl.trainer.metrics.curve import plot_curve
from agentrl.trainer.metrics.sinks import METRICS_FILE, RunProgress, Tracker, open_tracker
from agentrl.trainer.state.run_folder import RunLock

Advance = Callable[[int], None]


class RunLogger:
    """The voice of a run. On every rank but the main one it is silent.

    Args:
        config: Where to write, and to which sinks.
        is_main: Whether this rank speaks.
        console: Where lines go; standard output by default.
    """

    def __init__(
        self, config: TrainerConfig, *, is_main: bool = True, console: Console | None = None
    ) -> None:
        self._config = config
        self._is_main = is_main
        self.console = console or Console(highlight=False)
        self._tracker = Tracker([])
        self._bars: RunProgress | None = None
        self._lock = RunLock(config.default_local_dir)

    def lock_folder(self) -> None:
        """Lock the run's folder until `close`; the main rank does so for all ranks.

        Raises:
            ConfigError: if another run uses the folder.
        """
        if self._is_main:
            self._lock.take()

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self._config.default_local_dir

    def open(self, *, resumed_step: int | None, total_steps: int = 0) -> None:
        """Start tracking; figures beyond `resumed_step` are dropped, half-written files go."""
        if not self._is_main:
            return
        config = self._config
        for folder in (self.folder, config.rollout_data_dir, config.validation_data_dir):
            if folder is not None:
                remove_drafts(folder)
        self._tracker = open_tracker(
            config, resumed_step=resumed_step, total_steps=total_steps, console=self.console
        )

    def info(self, *lines: str) -> None:
        """Print lines."""
        for line in lines if self._is_main else ():
            self.console.print(line, markup=False, soft_wrap=True)

    def notes(self, notes: Iterable[str]) -> None:
        """Print notes for the user."""
        self.info(*(f"note: {note}" for note in notes))

    def track(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the figures of one step."""
        self._tracker.log(step, metrics)

    def bar(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """Show a progress bar during a `with` block, which advances it."""
        if not self._is_main:
            return nullcontext(_nothing)
        if self._bars is None:
            self._bars = RunProgress(self.console)
            self._bars.__enter__()
        return self._bars.task(name, total=total)

    @contextmanager
    def ignoring_write_errors(self, what: str) -> Iterator[None]:
        """Tell what of the block could not be written, and go on: it is only for looking at."""
        try:
            yield
        except OSError as error:
            self.info(f"note: {what} not written: {error}")

    def plot(self) -> None:
        """Draw the learning curve; a run without figures has none."""
        metrics = self.folder / METRICS_FILE
        if not (self._is_main and self._config.plot and metrics.is_file()):
            return
        try:
            with self.ignoring_write_errors("the learning curve"):
                plot_curve(
                    metrics,
                    self.folder / "curve.png",
                    title=f"{self._config.project_name} / {self._config.experiment_name}",
                )
        except DataError as error:
            self.info(f"no learning curve: {error}")

    def close(self) -> None:
        """Close what was opened; may be called twice."""
        if self._bars is not None:
            self._bars.__exit__()
            self._bars = None
        try:
            self._tracker.close()
        finally:
            self._lock.release()


def _nothing(_: int) -> None:
    """Advance no bar."""
