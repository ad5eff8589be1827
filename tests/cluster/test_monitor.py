"""What is known of processes, also after the monitor was started again."""

import pytest

pytest.importorskip("ray")

from agentrl.cluster.host import HostInfo
from agentrl.cluster.monitor import Heartbeat, Monitor, Silence, Snapshot


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def info(name: str) -> HostInfo:
    return HostInfo(
        name=name,
        role="train",
        pool="main",
        node_id="n",
        address="a",
        process=1,
        devices=(),
        num_starts=1,
    )


def heard(**seconds_ago: float) -> Snapshot:
    """A snapshot at 5,000 of the monitor's own clock."""
    beats = {name: Heartbeat(info(name), {}, 5000 - ago) for name, ago in seconds_ago.items()}
    return Snapshot(run={}, beats=beats, now=5000)


def test_a_process_stays_silent_when_the_monitor_is_started_again():
    clock = Clock()
    silence = Silence(clock)
    assert silence.measure(heard(a=1, b=9), ["a", "b"]) == {"a": 1, "b": 9}
    clock.now += 20
    assert silence.measure(heard(a=0), ["a", "b"]) == {"a": 0, "b": 29}
    clock.now += 20
    assert silence.measure(heard(), ["a", "b", "c"]) == {"a": 20, "b": 49, "c": 0}


def test_time_without_a_monitor_does_not_count():
    clock = Clock()
    silence = Silence(clock)
    silence.measure(heard(a=1), ["a"])
    clock.now += 100
    assert silence.measure(None, ["a"]) == {}
    assert silence.measure(heard(), ["a"]) == {"a": 0}
    clock.now += 5
    assert silence.measure(heard(), ["a"]) == {"a": 5}


def test_logs_that_nobody_takes_are_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.cluster.monitor.MAX_LOG_BYTES", 10)
    monitor = Monitor()
    for part in (b"123456", b"7890", b"abc"):
        monitor.append_log("rank_0", part)
    assert monitor.take_logs() == [
        ("dropped", b"[6 bytes of logs were dropped]\n"),
        ("rank_0", b"7890"),
        ("rank_0", b"abc"),
    ]
    assert monitor.take_logs() == []
