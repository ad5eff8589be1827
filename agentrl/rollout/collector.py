"""Look for reference cycles rarely while many requests are in flight.

Whatever a rollout makes lives until its end, so a search for garbage among it finds none; at
Python's usual thresholds there are some three hundred searches in a rollout of 512 requests, and
each full one goes through all that the program ever imported. What is no cycle is freed at once,
as ever.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 500_000
"""Objects that may come into being between two searches: those of some 4,500 requests."""


class _Guests:
    """Those who asked for rare searches, and the thresholds of the program that they run in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._host: tuple[int, int, int] = gc.get_threshold()

    def come(self) -> None:
        with self._lock:
            if not self._number:
                self._host = gc.get_threshold()
                gc.set_threshold(*_rarer(self._host))
            self._number += 1

    def go(self) -> None:
        with self._lock:
            self._number -= 1
            # Thresholds that the program has set meanwhile are the ones that it wants.
            if not self._number and gc.get_threshold() == _rarer(self._host):
                gc.set_threshold(*self._host)


def _rarer(thresholds: tuple[int, int, int]) -> tuple[int, int, int]:
    """Our thresholds; those of a program that searches more rarely yet, or never (0), stay."""
    young, middle, old = thresholds
    return (max(young, ALLOCATIONS) if young else 0, middle, old)


_GUESTS = _Guests()


@contextmanager
def rare_collection() -> Iterator[None]:
    """Raise the garbage collector's first threshold within the block, for the whole process.

    Behind the last of several such blocks that overlap, the thresholds are those from before.
    """
    _GUESTS.come()
    try:
        yield
    finally:
        _GUESTS.go()
