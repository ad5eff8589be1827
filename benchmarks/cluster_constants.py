"""Measure the constants of docs/scaling.md: what calls and objects of Ray cost on this machine.

    python benchmarks/cluster_constants.py

One caller, one actor, a new local cluster. Absolute figures depend on the machine and on its load;
each is the median of some rounds.
"""

import json
import os
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from agentrl.cluster.host import HostInfo
from agentrl.cluster.monitor import Monitor
from agentrl.protocol import DataProto

ROUNDS = 5
CALLS = 1000
TOKENS = 4096
"""Tokens of the finished request that is sent."""
PROCESSES = 1024
"""Processes of which the monitor knows heartbeats."""


class Echo:
    """Answers with the size of what it gets."""

    def size(self, value: object) -> int:
        """Return the length of bytes."""
        return len(value) if isinstance(value, bytes) else 0


def median_seconds(run: Callable[[], object]) -> float:
    run()
    seconds: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def make_request() -> bytes:
    """Pickle what a worker returns of one request: ids, mask and log-probabilities."""
    ids = list(range(TOKENS))
    return pickle.dumps({"ids": ids, "mask": [1] * TOKENS, "log_probs": [0.123456789] * TOKENS})


def fill_monitor() -> Any:
    """Start a monitor that knows all processes."""
    remote: Any = ray.remote
    monitor = remote(num_cpus=0)(Monitor).remote()
    for number in range(PROCESSES):
        info = HostInfo(
            name=f"rank_{number}",
            role="train",
            pool="main",
            node_id="0" * 56,
            address="10.0.0.1",
            process=number,
            devices=("0",),
            num_starts=1,
        )
        load = {"cpu_percent": 50.0, "rss_bytes": 1 << 34, "stage": "update of step 12"}
        ray.get(monitor.beat.remote(info, load))
    return monitor


def main() -> None:
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=400_000_000, log_to_driver=False
    )
    remote: Any = ray.remote
    echo = remote(num_cpus=0)(Echo).remote()
    request = make_request()
    rows = DataProto.from_dict({"x": torch.zeros(1024, 8192, dtype=torch.int64)})
    num_bytes = 1024 * 8192 * 8
    stored = ray.put(rows)
    one = median_seconds(lambda: [ray.get(echo.size.remote(b"")) for _ in range(CALLS)])
    many = median_seconds(lambda: ray.get([echo.size.remote(b"") for _ in range(CALLS)]))
    sent = median_seconds(lambda: ray.get([echo.size.remote(request) for _ in range(CALLS)]))
    put = median_seconds(lambda: ray.put(rows))
    got = median_seconds(lambda: ray.get(stored))
    monitor = fill_monitor()
    watched = median_seconds(lambda: ray.get(monitor.snapshot.remote()))
    before = time.process_time()
    for _ in range(ROUNDS):
        ray.get(monitor.snapshot.remote())
    watch_cpu_s = (time.process_time() - before) / ROUNDS
    result = {
        "cores": os.cpu_count(),
        "ray": ray.__version__,
        "call_and_wait_us": round(one / CALLS * 1e6),
        "calls_in_flight_us": round(many / CALLS * 1e6),
        "request_bytes": len(request),
        "request_bytes_per_token": round(len(request) / TOKENS, 1),
        "request_call_us": round(sent / CALLS * 1e6),
        "snapshot_ms": round(watched * 1e3, 1),
        "snapshot_cpu_ms": round(watch_cpu_s * 1e3, 1),
        "put_gb_per_s": round(num_bytes / put / 1e9, 2),
        "get_gb_per_s": round(num_bytes / got / 1e9, 2),
    }
    print(json.dumps(result, indent=1))
    ray.shutdown()


if __name__ == "__main__":
    main()
