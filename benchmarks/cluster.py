"""Rollouts in workers on a local Ray cluster, as ratios to one process without Ray.

Requests of three turns with two tool calls each; the tool computes for some milliseconds of Python,
so that one process can use one core. The tokenizer is Qwen2.5's; the scripted engine answers at
once on the rank, so that all its tokens travel to the workers and back. One process and each number
of workers alternate in every repeat; the ratio is that of the medians. CPU time is that of this
process and of the workers, with the threads of Ray in them.

Expectation: throughput with one worker at least 0.9 of one process; with two workers near the
number of free cores.

Run: python benchmarks/cluster.py [--tokenizer FOLDER] [--requests N] [--tool-ms MS]
    [--workers N ...] [--repeats N]
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import ray

from agentrl.cluster.handles import RemoteHost
from agentrl.cluster.rollout_workers import connect_workers
from agentrl.config import parse_config
from agentrl.config.schema.run import RunConfig
from agentrl.data.rows import Prompt
from agentrl.engines import ScriptedEngine
from agentrl.messages import Message
from agentrl.rollout import RolloutManager, StopReason
from agentrl.trainer.rollout_messages import RolloutConnection, WorkerSettings
from agentrl.trainer.rollout_pool import RolloutPool
from agentrl.trainer.rollout_worker import RolloutWorker
from agentrl.trainer.setup.plugins import load_plugins
from agentrl.trainer.setup.rollout_setup import make_manager, make_rollout_setup, probe_model

TOOL = """
import time

from agentrl.tools import function_tool


@function_tool
def compute(ms: float) -> str:
    \"\"\"Compute for some milliseconds.

    Args:
        ms: CPU milliseconds.
    \"\"\"
    end, number = time.thread_time() + ms / 1000, 0
    while time.thread_time() < end:
        number += sum(range(100))
    return "done: " + "the result of this call is a number " * 20
"""
THOUGHT = "I think about what the tool has returned, and whether another call would help. " * 4


class Hosted:
    """A rollout worker in an actor."""

    def __init__(self) -> None:
        self._worker = RolloutWorker()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker, or return the process's id."""
        return os.getpid() if method == "pid" else await getattr(self._worker, method)(*arguments)


class CountingConnection:
    """Counts the bytes and the calls of a connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.name = connection.name
        self.num_bytes = self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def send(self, session: str, messages: bytes) -> None:
        """Count and send."""
        self.num_bytes, self.num_calls = self.num_bytes + len(messages), self.num_calls + 1
        await self._connection.send(session, messages)

    async def receive(self, session: str) -> Any:
        """Count and receive."""
        received = await self._connection.receive(session)
        self.num_bytes += len(received.messages)
        self.num_calls += 1
        return received


class Bench:
    """The work, with a manager for each way of running it."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.asked = asked
        (folder / "tool.py").write_text(TOOL)
        self.config: RunConfig = parse_config(
            {
                "data": {"train_files": ["none.parquet"]},
                "model": {"path": asked.tokenizer},
                "rollout": {
                    "n": 8,
                    "max_concurrent_requests": asked.requests,
                    "multi_turn": {"function_tool_path": str(folder / "tool.py")},
                },
            }
        )
        plugins = load_plugins(self.config)
        probed = probe_model(self.config, plugins)
        self.setup = make_rollout_setup(self.config, plugins, probed)
        call = f'{{"name": "compute", "arguments": {{"ms": {asked.tool_ms}}}}}'
        turn = f"{THOUGHT}\n<tool_call>\n{call}\n</tool_call>"
        self.answers = [turn, turn, THOUGHT]
        text = "What is the result? " * 20
        self.prompts = [
            Prompt(index=index, messages=[Message(role="user", content=f"{index} {text}")])
            for index in range(-(-asked.requests // 8))
        ]

    def make_engine(self) -> ScriptedEngine:
        """Make the rank's engine."""
        return ScriptedEngine(self.answers, tokenizer=self.setup.tokenizer)

    def make_pool(self, connections: list[RolloutConnection]) -> RolloutPool:
        """Make the rank's pool."""
        settings = WorkerSettings(
            config=self.config,
            now=None,
            max_model_len=self.make_engine().max_model_len,
            asks_servers=False,
            version=0,
            silence_s=120.0,
        )
        return RolloutPool(connections, settings, tools=self.setup.plugins.tools)

    async def roll_out(self, pool: RolloutPool | None, processes: list[psutil.Process]) -> Any:
        """Run the work once; return wall seconds, CPU seconds and trained tokens."""
        run = None if pool is None else pool.run
        manager: RolloutManager = make_manager(self.config, self.setup, self.make_engine(), run)
        requests = manager.make_requests(self.prompts, manager.train_plan())
        cpu_s, wall_s = cpu_of(processes), time.perf_counter()
        finished = await manager.rollout(requests)
        wall_s, cpu_s = time.perf_counter() - wall_s, cpu_of(processes) - cpu_s
        assert all(one.stop_reason is StopReason.ANSWERED for one in finished), finished[0].error
        assert all(one.num_tool_calls == 2 for one in finished)
        return wall_s, cpu_s, sum(sum(one.loss_mask) for one in finished)


def cpu_of(processes: list[psutil.Process]) -> float:
    """Return the CPU seconds of processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(bench: Bench, asked: argparse.Namespace) -> None:
    """Alternate all ways, and print the ratios."""
    phases = {"ray": time.perf_counter()}
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, object_store_memory=100_000_000, **options)
    phases["ray"] = time.perf_counter() - phases["ray"]
    started = time.perf_counter()
    actor: Any = ray.remote(Hosted)
    actors = [
        actor.options(num_cpus=0, max_restarts=-1).remote() for _ in range(max(asked.workers))
    ]
    pids = [await one.call.remote("pid") for one in actors]
    phases["worker processes and imports"] = time.perf_counter() - started
    hosts = [RemoteHost(f"rollout_{i}", "rollout", "main", one) for i, one in enumerate(actors)]
    made = connect_workers(hosts, call_timeout_s=120.0, start_timeout_s=300.0)
    connections = [CountingConnection(one) for one in made]
    started = time.perf_counter()
    pools: dict[int, RolloutPool | None] = {0: None}
    for number in asked.workers:
        pools[number] = bench.make_pool(connections[:number])
        await pools[number].open()
    phases["tokenizer, template, plug-ins"] = time.perf_counter() - started
    own = psutil.Process()
    workers = [psutil.Process(pid) for pid in pids]
    seen: defaultdict[int, list[Any]] = defaultdict(list)
    for repeat in range(asked.repeats + 1):
        for number, pool in pools.items():
            before = [(one.num_bytes, one.num_calls) for one in connections]
            result = await bench.roll_out(pool, [own, *workers])
            moved = sum(c.num_bytes - b[0] for c, b in zip(connections, before, strict=True))
            calls = sum(c.num_calls - b[1] for c, b in zip(connections, before, strict=True))
            if repeat:  # the first one warms up
                seen[number].append((*result, moved, calls))
    print("start-up:", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items()))
    report(asked, seen)
    for pool in pools.values():
        if pool is not None:
            await pool.close()
    ray.shutdown()


def report(asked: argparse.Namespace, seen: dict[int, list[Any]]) -> None:
    """Print a line for each number of workers."""
    base_s, base_cpu_s = (statistics.median(run[i] for run in seen[0]) for i in (0, 1))
    print(f"one process: {base_s:.2f} s, {base_cpu_s / asked.requests * 1e6:.0f} us CPU a request")
    for number in asked.workers:
        wall_s, cpu_s, tokens, moved, calls = (
            statistics.median(run[i] for run in seen[number]) for i in range(5)
        )
        added_us = (cpu_s - base_cpu_s) / asked.requests * 1e6
        print(
            f"{number} workers: {base_s / wall_s:.2f} of the throughput of one process; "
            f"{added_us:+.0f} us CPU a request through Ray (3 turns); "
            f"{moved / tokens:.1f} bytes a trained token; "
            f"{calls / asked.requests:.2f} remote calls a request",
            flush=True,
        )
    print(f"   load: {os.getloadavg()}, {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollout workers, as ratios to one process.")
    parser.add_argument("--tokenizer", default="../shared/data/tokenizers/qwen2_5")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tool-ms", type=float, default=10.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Bench(asked, Path(folder)), asked))


if __name__ == "__main__":
    main()
