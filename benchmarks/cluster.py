"""Rollouts in workers on a local Ray cluster, as ratios to one process without Ray.

Requests of three turns with two tool calls each. Two kinds of tools: one computes for some
milliseconds of Python on a thread, so that one process can use one core; one does the same in a
process for each request (`isolation: process`), which uses all cores also without Ray. The
tokenizer is Qwen2.5's; the scripted engine answers at once on the rank, so that all its tokens
travel to the workers and back. One process and each number of workers alternate in every repeat;
the ratio is that of the medians. CPU time is that of this process and of the workers, with the
threads of Ray in them and without the tools' processes.

Expectation, on two free cores: with the tool on threads at least 0.9 of the throughput of one
process with one worker, and near 2 with two and four; with the tool in processes about 1. CPU of a
request through Ray: verl 0.9.1 takes 4,800 to 7,200 us of CPU for a turn.

Run: python benchmarks/cluster.py [--tokenizer FOLDER] [--requests N] [--process-requests N]
    [--tool-ms MS] [--workers N ...] [--repeats N]
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
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
TURNS = 3
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

    def __init__(self, asked: argparse.Namespace, folder: Path, *, isolation: str) -> None:
        self.isolation = isolation
        num_requests = asked.process_requests if isolation == "process" else asked.requests
        self.num_requests = num_requests = -(-num_requests // 8) * 8
        decorator = f"@function_tool(config={{'isolation': '{isolation}'}})"
        (folder / f"{isolation}.py").write_text(TOOL.replace("@function_tool", decorator))
        self.config: RunConfig = parse_config(
            {
                "data": {"train_files": ["none.parquet"]},
                "model": {"path": asked.tokenizer},
                "rollout": {
                    "n": 8,
                    "max_concurrent_requests": num_requests,
                    "multi_turn": {"function_tool_path": str(folder / f"{isolation}.py")},
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
            for index in range(num_requests // 8)
        ]

    def make_engine(self) -> ScriptedEngine:
        """Make the rank's engine."""
        return ScriptedEngine(self.answers, tokenizer=self.setup.tokenizer)

    def make_pool(self, connections: Sequence[RolloutConnection]) -> RolloutPool:
        """Make the rank's pool."""
        settings = WorkerSettings(
            config=self.config,
            now=None,
            max_model_len=self.make_engine().max_model_len,
            asks_servers=False,
            version=0,
            silence_s=120.0,
        )
        return RolloutPool(list(connections), settings, tools=self.setup.plugins.tools)

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


async def measure(asked: argparse.Namespace, folder: Path) -> None:
    """Start the workers, and measure each kind of tool."""
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
    processes = [psutil.Process(pid) for pid in (os.getpid(), *pids)]
    for isolation in ("none", "process"):
        bench = Bench(asked, folder, isolation=isolation)
        started = time.perf_counter()
        pools: dict[int, RolloutPool | None] = {0: None}
        for number in asked.workers:
            pools[number] = pool = bench.make_pool(connections[:number])
            await pool.open()
        phases["tokenizer, template, plug-ins"] = time.perf_counter() - started
        if isolation == "none":
            shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
            print(f"start-up, {len(actors)} workers: {shown}", flush=True)
        seen = await alternate(bench, pools, connections, processes, asked.repeats)
        where = "in a process for each request" if isolation == "process" else "on threads"
        print(f"the tool computes {where}, {bench.num_requests} requests")
        report(bench.num_requests, seen)
        for pool in pools.values():
            if pool is not None:
                await pool.close()
    print(f"load: {os.getloadavg()}, {os.cpu_count()} cores")
    ray.shutdown()


async def alternate(
    bench: Bench,
    pools: dict[int, RolloutPool | None],
    connections: list[CountingConnection],
    processes: list[psutil.Process],
    repeats: int,
) -> dict[int, list[Any]]:
    """Run the work in all ways, one after another, in each repeat; return the figures of each."""
    seen: defaultdict[int, list[Any]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for number, pool in pools.items():
            before = [(one.num_bytes, one.num_calls) for one in connections]
            result = await bench.roll_out(pool, processes)
            moved = sum(c.num_bytes - b[0] for c, b in zip(connections, before, strict=True))
            calls = sum(c.num_calls - b[1] for c, b in zip(connections, before, strict=True))
            if repeat:  # the first one warms up
                seen[number].append((*result, moved, calls))
    return seen


def report(num_requests: int, seen: dict[int, list[Any]]) -> None:
    """Print a line for each number of workers."""
    base_s, base_cpu_s = (statistics.median(run[i] for run in seen[0]) for i in (0, 1))
    print(f"   one process: {base_s:.2f} s, {base_cpu_s / num_requests * 1e6:.0f} us CPU a request")
    for number in [number for number in seen if number]:
        wall_s, cpu_s, tokens, moved, calls = (
            statistics.median(run[i] for run in seen[number]) for i in range(5)
        )
        added_us = (cpu_s - base_cpu_s) / num_requests * 1e6
        print(
            f"   {number} workers: {base_s / wall_s:.2f} of the throughput of one process; "
            f"{added_us:+.0f} us CPU a request through Ray, {added_us / TURNS:+.0f} us a turn "
            f"(verl 0.9.1: 4,800 to 7,200 us a turn); {moved / tokens:.1f} bytes a trained token; "
            f"{calls / num_requests:.2f} remote calls a request",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollout workers, as ratios to one process.")
    parser.add_argument("--tokenizer", default="../shared/data/tokenizers/qwen2_5")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--process-requests", type=int, default=32)
    parser.add_argument("--tool-ms", type=float, default=10.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(asked, Path(folder)))


if __name__ == "__main__":
    main()
