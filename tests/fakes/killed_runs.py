"""Runs that are killed: a process that has imported everything and forks one child for each run.

`python -m tests.fakes.killed_runs` reads one order (a line of JSON) for each run and writes these
lines to its standard output: `started PID`, then `enter POINT STEP` and `leave POINT STEP` from the
child itself, then `ended STATUS`.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).resolve().parents[2]
KILL_POINTS = ("roll_out", "update_actor", "save_checkpoint")
"""Stages during which a run is killed; the last one is the write in the background."""
SCORER = """
import random

import numpy
import torch


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    noise = random.random() + numpy.random.random() + float(torch.rand(()))
    return sum(map(ord, solution_str)) % 7 / 7 + noise / 10
"""
"""Rewards that differ within groups and draw from every random stream of the process. The scorer is
a coroutine that never waits, so it runs in the order of the requests."""
_PRELOADED = (
    "datasets",
    "agentrl.trainer.trainer",
    "agentrl.engines.transformers.engine",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
)


class Mark(NamedTuple):
    """A line in which a run reports its position."""

    event: str
    """`enter` or `leave`."""
    point: str
    step: int


# The side of the tests.


@dataclass
class ChildRun:
    """One run in a child process."""

    pid: int
    lines: Iterator[str]
    marks: list[Mark] = field(default_factory=list[Mark])
    times: list[float] = field(default_factory=list[float])
    """When each mark was read, in seconds."""
    status: int | None = None
    """Exit status, or minus the signal's number; None while it runs."""

    def wait_for(self, mark: Mark) -> bool:
        """Read until the mark or the end; return whether the mark came."""
        while self._read():
            if self.marks and self.marks[-1] == mark:
                return True
        return False

    def wait(self) -> int:
        """Read until the end."""
        while self._read():
            pass
        assert self.status is not None
        return self.status

    def kill_after(self, delay_s: float, number: int = signal.SIGKILL) -> None:
        """Send SIGKILL, or another signal, after a delay."""
        time.sleep(delay_s)
        os.kill(self.pid, number)

    def is_inside(self, mark: Mark) -> bool:
        """Return whether it entered and did not leave."""
        return mark in self.marks and mark._replace(event="leave") not in self.marks

    def _read(self) -> bool:
        event, *rest = next(self.lines).split()
        if event == "ended":
            self.status = int(rest[0])
            return False
        self.marks.append(Mark(event, rest[0], int(rest[1])))
        self.times.append(time.perf_counter())
        return True


class RunForker:
    """A process that forks runs, one at a time."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.killed_runs"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)

    def start(self, run: dict[str, Any], log: Path) -> ChildRun:
        """Start a run; its output goes to `log`."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"run": run, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        event, pid = self._process.stdout.readline().split()
        assert event == "started"
        return ChildRun(int(pid), iter(self._process.stdout))


# The side of the runs.


def main() -> None:
    """Fork a child for each order."""
    import torch

    torch.set_num_threads(1)
    for name in _PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_child(order["run"], Path(order["log"]))
        _say("started", pid)
        _, status = os.waitpid(pid, 0)
        _say("ended", os.waitstatus_to_exitcode(status))


def run_child(run: dict[str, Any], log: Path) -> None:
    """Run in this process and exit; never return."""
    code = 1
    try:
        marks = os.dup(1)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        train(run, marks)
        code = 0
    except BaseException:  # noqa: BLE001 - this process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train(run: dict[str, Any], marks: int) -> None:
    """Train, and write a mark to the file descriptor `marks` at each point."""
    from agentrl.config import parse_config
    from agentrl.trainer.trainer import Trainer
    from agentrl.workers import snapshot

    def mark(event: str, point: str, step: int) -> None:
        os.write(marks, f"{event} {point} {step}\n".encode())

    class MarkedWriter(snapshot.CheckpointWriter):
        """Reports when the threads begin to write, and when the checkpoint is visible."""

        def write_rank(self, *arguments: Any) -> None:
            mark("enter", "save_checkpoint", self.state.step)
            super().write_rank(*arguments)

        def publish(self, draft: Path) -> Path:
            path = super().publish(draft)
            mark("leave", "save_checkpoint", self.state.step)
            return path

    class MarkedTrainer(Trainer):
        """Reports when it enters and leaves the points at which it may be killed."""

        @contextlib.contextmanager
        def _inside(self, point: str) -> Iterator[None]:
            mark("enter", point, self.step)
            yield
            mark("leave", point, self.step)

        def roll_out(self, prompts: Sequence[Any], plan: Any) -> Any:
            with self._inside("roll_out" if plan.name == "train" else "validate"):
                return super().roll_out(prompts, plan)

        def update_actor(self, batch: Any) -> Any:
            with self._inside("update_actor"):
                return super().update_actor(batch)

    snapshot.CheckpointWriter = MarkedWriter
    MarkedTrainer(parse_config(run)).fit()


def _say(event: str, value: int) -> None:
    os.write(1, f"{event} {value}\n".encode())


if __name__ == "__main__":
    main()
