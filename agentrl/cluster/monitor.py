"""The actor that knows how all processes of a run are: heartbeats, logs, and the run's table.

`agentrl status` finds it by the run's name from any process of the cluster.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from agentrl.cluster.host import HostInfo

NAMESPACE = "agentrl"
"""Ray's namespace of all runs."""
MAX_LOG_BYTES = 16 << 20
"""Bytes of logs that wait for the driver; older ones are dropped, and their number is logged."""


@dataclass(slots=True)
class Heartbeat:
    """The last report of a process."""

    info: HostInfo
    load: dict[str, Any]
    received: float
    """Time of the monitor's clock."""


@dataclass(slots=True)
class Snapshot:
    """All that is known of a run at one time."""

    run: dict[str, Any]
    """What the driver announced: folder, pools, start time, state."""
    beats: dict[str, Heartbeat]
    now: float
    """The monitor's clock, to which the heartbeats refer."""
    ended: dict[str, str] = field(default_factory=dict[str, str])
    """Processes that ended, each with the reason."""


class Silence:
    """How long processes have sent no heartbeat, also if the monitor was started again since.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, float] = {}

    def measure(self, snapshot: Snapshot | None, names: Iterable[str]) -> dict[str, float]:
        """Return the seconds since the last heartbeat of each process.

        A monitor that was started again does not know earlier heartbeats. For a process of which
        none is known, the time of the first call counts as one.

        Args:
            snapshot: Of the monitor; None if it did not answer. That time does not count.
            names: The processes.
        """
        now = self._clock()
        if snapshot is None:
            self._heard.clear()
            return {}
        for name, beat in snapshot.beats.items():
            self._heard[name] = now - (snapshot.now - beat.received)
        return {name: now - self._heard.setdefault(name, now) for name in names}


class Monitor:
    """Holds the state of a run; `ray.remote` makes an actor of it."""

    def __init__(self) -> None:
        self._run: dict[str, Any] = {}
        self._beats: dict[str, Heartbeat] = {}
        self._ended: dict[str, str] = {}
        self._logs: deque[tuple[str, bytes]] = deque()
        self._log_bytes = 0
        self._dropped = 0

    def announce(self, run: dict[str, Any]) -> None:
        """Set facts of the run."""
        self._run |= run

    def beat(self, info: HostInfo, load: dict[str, Any]) -> None:
        """Record the heartbeat of a process."""
        self._beats[info.name] = Heartbeat(info, load, time.time())
        self._ended.pop(info.name, None)

    def forget(self, name: str, reason: str) -> None:
        """Record that a process has ended."""
        self._beats.pop(name, None)
        self._ended[name] = reason

    def snapshot(self) -> Snapshot:
        """Return all that is known."""
        return Snapshot(self._run, self._beats, time.time(), self._ended)

    def append_log(self, name: str, part: bytes) -> None:
        """Keep a part of a log until the driver takes it."""
        self._logs.append((name, part))
        self._log_bytes += len(part)
        while self._log_bytes > MAX_LOG_BYTES:
            _, oldest = self._logs.popleft()
            self._log_bytes -= len(oldest)
            self._dropped += len(oldest)

    def take_logs(self) -> list[tuple[str, bytes]]:
        """Return the parts that arrived since the last call."""
        parts = list(self._logs)
        if self._dropped:
            text = f"[{self._dropped} bytes of logs were dropped]\n"
            parts.insert(0, ("dropped", text.encode()))
        self._logs.clear()
        self._log_bytes = self._dropped = 0
        return parts
