"""Collect the spans of a step, and export them on a thread: the run does not wait for exporters."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, NamedTuple

from agentrl.config.schema.run import RunConfig, TrainerConfig
from agentrl.plugins.environment import require_package
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.tracing.spans import Interval, Trace, request_span, step_span
from agentrl.trainer.tracing.trace_files import save_trace_file

if TYPE_CHECKING:
    from agentrl.trainer.tracing.otlp import OtlpExporter
    from agentrl.workers.distributed import World

FOLDER = "traces"
"""Subfolder of the run's folder."""
MAX_QUEUED = 4
"""Steps that wait for a slow exporter; further ones are dropped."""
CLOSE_S = 5.0
"""Seconds that the end of a run waits for the exporters."""
_OTLP_PACKAGE = "opentelemetry.exporter.otlp.proto.http"


def check_tracing(config: TrainerConfig) -> None:
    """Check that the packages of the exporters of `trainer.tracing` are installed.

    Raises:
        MissingExtraError: naming the extra.
    """
    if "otlp" not in config.tracing.exporters:
        return
    for package in ("opentelemetry.sdk", _OTLP_PACKAGE):
        parts = package.split(".")
        for end in range(1, len(parts) + 1):  # a package is found only if its parents are there
            name = ".".join(parts[:end])
            require_package(name, extra="otel", what="trainer.tracing.exporters: otlp")


class _Step(NamedTuple):
    step: int
    traces: Sequence[Trace]


class Tracer:
    """Makes one trace of each request and of each step, and exports those of all ranks.

    Args:
        config: The run: its exporters, the steps that are traced, and how rewards are combined.
        world: The ranks. The main rank exports.
        report: Prints a line for the user; called from another thread too.
    """

    def __init__(self, config: RunConfig, world: "World", report: Callable[[str], None]) -> None:
        tracing = config.trainer.tracing
        self._freq = tracing.freq if tracing.exporters else 0
        self._reward = config.reward
        self._world = world
        self._traces: list[Trace] = []
        self._step = 0
        exports = self._freq and world.is_main
        self._export = TraceExport(config.trainer, report) if exports else None

    def add(self, step: int, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Make the spans of finished requests, and set the ids of their traces."""
        if not self._is_due(step):
            return
        self._step = step
        for request in requests:
            if (span := request_span(request, step, self._reward)) is not None:
                request.trace_id = uuid.uuid4().hex
                self._traces.append(Trace(request.trace_id, self._world.rank, span))

    def end_step(self, step: int, intervals: Iterable[Interval]) -> None:
        """Export the spans of a step. A collective if the step is traced."""
        if not self._is_due(step):
            return
        if (span := step_span(step, intervals)) is not None:
            self._traces.append(Trace("", self._world.rank, span))
        traces, self._traces = self._world.gather_on_main(self._traces), []
        # A run that resumes has no requests of its first step: keep the file of the earlier run.
        if self._export is not None and any(one.trace_id for one in traces):
            trace_id = uuid.uuid4().hex  # the ranks' parts of a step are one trace
            self._export.put(
                step, [one if one.trace_id else one._replace(trace_id=trace_id) for one in traces]
            )

    def close(self) -> None:
        """End the exporters. If the run ended within a step, export its requests of this rank."""
        if self._export is not None:
            if self._traces:
                self._export.put(self._step, self._traces)
            self._export.close()

    def _is_due(self, step: int) -> bool:
        return self._freq > 0 and step % self._freq == 0


class TraceExport:
    """Writes and sends traces on a thread. Only `close` waits, at most `CLOSE_S`.

    Args:
        config: The exporters, and the run's folder and names.
        report: Prints a line for the user; called from the thread.
    """

    def __init__(self, config: TrainerConfig, report: Callable[[str], None]) -> None:
        self._config, self._report = config, report
        self._queue: Queue[_Step | None] = Queue(MAX_QUEUED)
        self._reported: set[str] = set()
        self._otlp: OtlpExporter | None = None
        self._thread = threading.Thread(target=self._run, name="agentrl-traces", daemon=True)
        self._thread.start()

    def put(self, step: int, traces: Sequence[Trace]) -> None:
        """Queue the traces of a step."""
        try:
            self._queue.put_nowait(_Step(step, traces))
        except Full:
            self._note("queue", f"{MAX_QUEUED} steps wait for an exporter; traces are dropped")

    def close(self) -> None:
        """Wait for the exporters, and give up if they take too long."""
        end = time.monotonic() + CLOSE_S
        with suppress(Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            if self._otlp is not None:
                self._otlp.close()
            self._note("close", f"not all were exported within {CLOSE_S:g} s")

    def _run(self) -> None:
        exporters: dict[str, Callable[[_Step], None]] = {}
        for name in dict.fromkeys(self._config.tracing.exporters):
            exporters[name] = self._save if name == "file" else self._make_otlp()
        for one in iter(self._queue.get, None):
            for name, export in exporters.items():
                try:
                    export(one)
                except Exception as error:  # noqa: BLE001 - tracing must not stop a run
                    self._note(name, f"step {one.step} was not exported by {name!r}: {error}")

    def _save(self, one: _Step) -> None:
        folder: Path = self._config.default_local_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        save_trace_file(folder / f"step_{one.step:06d}.json", one.traces)

    def _make_otlp(self) -> Callable[[_Step], None]:
        from agentrl.trainer.tracing.otlp import OtlpExporter

        names = {
            "agentrl.project": self._config.project_name,
            "agentrl.experiment": self._config.experiment_name,
            "agentrl.run": str(self._config.default_local_dir),
        }
        self._otlp = exporter = OtlpExporter(self._config.tracing.endpoint, names)
        return lambda one: exporter.export(one.traces)

    def _note(self, kind: str, text: str) -> None:
        """Report a kind of failure, once."""
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(f"note: traces: {text}")
