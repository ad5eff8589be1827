"""Reads what a process writes, and knows when to stop."""

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

_CHUNK = 65536
_FLOOD_FACTOR = 256
"""What writes this often the output that is kept is killed: nobody will read it."""


class Watch:
    """Keeps the first of an output, until it ends, its time is up, or it is a flood.

    Args:
        outputs: Descriptors of its output and its error output, which do not block.
        timeout_s: Seconds.
        max_output_bytes: Bytes of output that are kept.
        answers: A descriptor on which an answer may come, or None.
    """

    def __init__(
        self,
        outputs: Sequence[int],
        timeout_s: float,
        max_output_bytes: int,
        *,
        answers: int | None = None,
    ) -> None:
        self._outputs, self._answers = outputs, answers
        self._kept = {descriptor: bytearray() for descriptor in outputs}
        self._max_bytes = max_output_bytes
        self._num_bytes = 0
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._open = set(outputs)

    @property
    def is_late(self) -> bool:
        """Whether its time is up."""
        return time.monotonic() >= self._deadline

    @property
    def is_flooded(self) -> bool:
        """Whether it writes without end."""
        return self._num_bytes > _FLOOD_FACTOR * self._max_bytes

    @property
    def _num_kept(self) -> int:
        return sum(map(len, self._kept.values()))

    def until(self, is_done: Callable[[], bool]) -> bool:
        """Read until it is done (True), or its time is up or it is a flood."""
        while not (done := is_done()) and not self.is_late and not self.is_flooded:
            self._wait()
        while not self.is_flooded and self._read_all():
            pass  # what is in the pipes now
        return done

    def _read_all(self) -> bool:
        return sum(self._read(descriptor) for descriptor in [*self._open]) > 0

    def _wait(self) -> None:
        extra = [] if self._answers is None else [self._answers]
        # The end of a program that closed its output wakes nobody: it is looked for, in steps.
        step_s = 0.05 if self._open else 0.005
        left_s = max(0.0, self._deadline - time.monotonic())
        for descriptor in select.select([*self._open, *extra], [], [], min(step_s, left_s))[0]:
            if descriptor != self._answers:
                self._read(descriptor)

    def _read(self, descriptor: int) -> bool:
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._open.discard(descriptor)
            return False
        self._kept[descriptor] += chunk[: max(0, self._max_bytes - self._num_kept)]
        self._num_bytes += len(chunk)
        return True

    def told(self) -> dict[str, Any]:
        """Say what was read, as an answer says it."""
        stdout, stderr = (self._kept[d].decode(errors="replace") for d in self._outputs)
        if self.is_flooded:
            stderr += f"[killed: it wrote more than {_FLOOD_FACTOR * self._max_bytes} bytes]\n"
        return {
            "stdout": stdout,
            "stderr": stderr,
            "seconds": time.monotonic() - self._started,
            "num_cut_bytes": self._num_bytes - self._num_kept,
        }


LATE = "[killed: its time was up]\n"


def output_pipe() -> tuple[int, int]:
    """Open a pipe of which the near end does not block."""
    near, far = os.pipe()
    os.set_blocking(near, False)
    return near, far
