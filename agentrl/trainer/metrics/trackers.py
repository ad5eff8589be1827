"""Trackers: Weights & Biases, MLflow, SwanLab and trackio, which show the metrics of many runs.

Each tracker works in a child process (`tracker_process`). A step puts its metrics into a bounded
queue and continues; a thread sends them. So a tracker that is slow or hangs costs the run nothing,
and it can be killed: some packages wait for their servers when their process ends.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple, get_args

from agentrl.config.schema.run import TrackerName, TrainerConfig
from agentrl.plugins.environment import require_package
from agentrl.trainer.metrics.logins import check_login
from agentrl.trainer.metrics.tracker_process import TrackedRun

TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)
MAX_QUEUED = 256
"""Messages that wait for a slow tracker; further ones are dropped."""
CLOSE_S = 60.0
"""Seconds that the end of a run waits for all trackers."""
_PACKAGES = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}
_CLOSED = json.dumps({"closed": True}) + "\n"


class Generation(NamedTuple):
    """A rollout as a row of a tracker's table; rows are sorted by their first fields."""

    sample: int
    """Index among the samples of the prompt."""
    row: int
    """Index of the prompt in its batch."""
    prompt: str
    response: str
    reward: float
    stop_reason: str


def check_trackers(config: TrainerConfig) -> None:
    """Check that the trackers of `trainer.logger` have their packages and their logins.

    Raises:
        MissingExtraError: naming the extra.
        ConfigError: naming the ways to log in.
    """
    for name in TRACKERS:
        if name in config.logger:
            for package in _PACKAGES.get(name, (name,)):
                require_package(package, extra=name, what=f"trainer.logger: {name}")
            check_login(name)


class TrackerSink:
    """Sends metrics and tables to one tracker. Only `close` waits, at most `CLOSE_S`.

    Args:
        run: What the tracker needs to know of the run.
        report: Prints a line for the user; called from other threads.
    """

    def __init__(self, run: TrackedRun, report: Callable[[str], None]) -> None:
        self.name = run.tracker
        self._log_file = Path(run.folder) / "logs" / f"{run.tracker}.log"
        self._report = report
        self._queue: Queue[str | None] = Queue()
        self._process: subprocess.Popen[str] | None = None
        self._has_dropped = False
        self._is_ended = False
        self._close_at: float | None = None
        self._put(asdict(run))
        self._sender = threading.Thread(target=self._send, name=self.name, daemon=True)
        self._sender.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of one step."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._put({"step": step, "metrics": numbers})

    def log_generations(self, step: int, name: str, rows: Sequence[Generation]) -> None:
        """Queue a table of rollouts of one step, before the step's metrics."""
        columns = ["step", *Generation._fields]
        table = {"name": name, "columns": columns, "rows": [[step, *row] for row in rows]}
        self._put({"step": step, "table": table})

    def end(self) -> None:
        """Let the tracker send the rest and finish; `close` waits for it, from now on."""
        if self._close_at is None:
            self._close_at = time.monotonic() + CLOSE_S
            self._queue.put(None)

    def is_finished(self, wait_s: float) -> bool:
        """Return whether the tracker has everything, after at most some seconds."""
        self._sender.join(max(0.0, wait_s))
        return not self._sender.is_alive()

    def close(self) -> None:
        """Wait until the tracker has everything; kill its process if that takes too long."""
        self.end()
        assert self._close_at is not None
        if self.is_finished(self._close_at - time.monotonic()):
            return
        self._note(f"did not finish in {CLOSE_S:g} s, and is ended: the rest is not sent")
        self._is_ended = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._sender.join(1.0)

    def _note(self, text: str) -> None:
        self._report(f"note: {self.name}: {text}")

    def _put(self, message: dict[str, Any]) -> None:
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put(f"{json.dumps(message, ensure_ascii=False)}\n")
        elif not self._has_dropped:
            self._has_dropped = True
            self._note(f"too slow: {MAX_QUEUED} messages wait, and further ones are dropped")

    def _send(self) -> None:
        """Start the child process, send what is queued, and wait for the end of the process."""
        try:
            process = self._start()
        except OSError as error:
            self._note(f"not started, and the run continues without it: {error}")
            for _ in iter(self._queue.get, None):
                pass
            return
        self._process = process
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        with process:
            assert process.stdin is not None
            for line in chain(iter(self._queue.get, None), [_CLOSED]):
                with suppress(OSError):  # if the process has ended, the queue is only emptied
                    process.stdin.write(line)
                    process.stdin.flush()
            with suppress(OSError):
                process.stdin.close()
            reader.join()

    def _start(self) -> "subprocess.Popen[str]":
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "agentrl.trainer.metrics.tracker_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                errors="replace",  # lone surrogates, which some packages cannot store
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the run, which then closes the sink
            )

    def _read(self, process: "subprocess.Popen[str]") -> None:
        """Report the messages of the child process, and its end if it crashes."""
        assert process.stdout is not None
        for line in process.stdout:
            self._note(line.strip())
        code = process.wait()
        if code and not self._is_ended:
            self._note(
                f"its process ended with code {code}, and the run continues without it; "
                f"{self._log_file} has the reason"
            )
