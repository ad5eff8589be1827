"""Read what a process writes, and decide when to stop."""

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

TIMED_OUT = "[killed: its time was up]\n"
_CHUNK = 65536
_FLOOD_FACTOR = 256
"""A process that writes this many times the kept output is killed: nothing reads the rest."""


def output_pipe() -> tuple[int, int]:
    """Open a pipe with a reading end that does not block."""
    near, far = os.pipe()
    os.set_blocking(near, False)
    return near, far


class OutputReader:
    """Keeps the start of an output until it ends, its time is up, or it is a flood.

    Args:
        outputs: Descriptors of stdout and stderr, which do not block.
        timeout_s: Seconds from now on.
        max_output_bytes: Bytes of output that are kept.
        max_end_bytes: How many of them are kept from the end of a longer output, in equal parts for
            each descriptor.
        answers: A descriptor to wait for besides the outputs.
    """

    def __init__(
        self,
        outputs: Sequence[int],
        timeout_s: float,
        max_output_bytes: int,
        *,
        max_end_bytes: int = 0,
        answers: int | None = None,
    ) -> None:
        self._outputs = outputs
        self._extra = [] if answers is None else [answers]
        self._kept = {descriptor: bytearray() for descriptor in outputs}
        self._ends = {descriptor: bytearray() for descriptor in outputs}
        self._has_gap = dict.fromkeys(outputs, False)
        self._max_bytes = max_output_bytes
        self._max_end_bytes = max_end_bytes // len(outputs)
        self._max_start_bytes = max_output_bytes - self._max_end_bytes * len(outputs)
        self._num_bytes = 0
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._open = set(outputs)

    @property
    def is_flooded(self) -> bool:
        """Whether the process writes without end."""
        return self._num_bytes > _FLOOD_FACTOR * self._max_bytes

    def read_until(self, is_done: Callable[[], bool]) -> None:
        """Read until `is_done`, the deadline, or a flood; then read what the pipes still hold."""
        while not is_done() and time.monotonic() < self._deadline and not self.is_flooded:
            self._wait()
        while not self.is_flooded and sum([self._read(each) for each in self._open.copy()]):
            pass

    def _wait(self) -> None:
        # The end of a program that closed its output wakes no `select`: look for it in steps.
        step_s = 0.05 if self._open else 0.005
        left_s = max(0.0, self._deadline - time.monotonic())
        ready, _, _ = select.select([*self._open, *self._extra], [], [], min(step_s, left_s))
        for descriptor in self._open.intersection(ready):
            self._read(descriptor)

    def _read(self, descriptor: int) -> bool:
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._open.discard(descriptor)
            return False
        self._num_bytes += len(chunk)
        num_kept = sum(map(len, self._kept.values()))
        free = max(0, self._max_start_bytes - num_kept)
        self._kept[descriptor] += chunk[:free]
        end = self._ends[descriptor]
        end += chunk[free:]
        if len(end) > self._max_end_bytes:
            del end[: len(end) - self._max_end_bytes]
            self._has_gap[descriptor] = True
        return True

    def _text(self, descriptor: int) -> str:
        gap = b"\n" if self._has_gap[descriptor] and self._ends[descriptor] else b""
        kept = self._kept[descriptor] + gap + self._ends[descriptor]
        return kept.decode(errors="replace")

    def result(self) -> dict[str, Any]:
        """Return what was read, in the fields of an answer."""
        stdout, stderr = map(self._text, self._outputs)
        num_kept = sum(len(part) for kept in (self._kept, self._ends) for part in kept.values())
        if self.is_flooded:
            stderr += f"[killed: it wrote more than {_FLOOD_FACTOR * self._max_bytes} bytes]\n"
        return {
            "stdout": stdout,
            "stderr": stderr,
            "seconds": time.monotonic() - self._started,
            "num_cut_bytes": self._num_bytes - num_kept,
        }
