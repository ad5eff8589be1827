"""What running a model's code in a sandbox costs, behind each provider that runs here.

For each provider, on one event loop, one call after another:

1. call: a trivial call (`x = 1`) in a session that is open. The aim is 5 ms.
2. first call, warm: the first call of a session, with interpreters kept ready; a pause like a
   policy's turn (`--pause-s`, not counted) lets the pool fill again, as a rollout does. Session,
   warm: with its close.
3. first call and session, cold: the same with `num_warm: 0`.
4. program: `run_program(["python", "-c", "x = 1"])`, with interpreters kept ready, and cold.
5. together: 64 sessions at once, of 4 calls each: calls a second, with their starts and ends.

Beside them stands what no sandbox can beat in starting Python: `python -I -S -c "x = 1"` by the
standard library, whose median is the unit of the ratios. Closing waits until every process of the
session is dead and its folder is gone.

Run: python benchmarks/sandbox.py [--repeats N] [--sessions N] [--pause-s S] [--providers NAME ...]
"""

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.sandbox import Sandbox, Session, make_sandbox
from agentrl.sandbox.factory import unavailable_reason

TRIVIAL = "x = 1"
PROVIDERS = ("sandlock", "bubblewrap", "subprocess")
CALLS_TOGETHER = 4
BOUND_MS = 5.0


@dataclass(frozen=True, slots=True)
class Times:
    """How long something took, in milliseconds, sorted."""

    ms: list[float]

    @property
    def p50(self) -> float:
        """Half take no longer."""
        return statistics.median(self.ms)

    @property
    def p95(self) -> float:
        """Nineteen of twenty take no longer."""
        return self.ms[int(0.95 * (len(self.ms) - 1))]

    def line(self, what: str, unit_ms: float) -> str:
        """Lay it out, with its ratio to a unit."""
        ratio = self.p50 / unit_ms
        return (
            f"{self.p50:9.2f} ms p50 {self.p95:9.2f} ms p95 {ratio:7.2f} x  {1e3 / self.p50:7.0f}/s"
            f"  {what}"
        )


async def measure(work: Callable[[], Awaitable[object]], repeats: int, pause_s: float) -> Times:
    ms: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        await work()
        ms.append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(pause_s)
    return Times(sorted(ms))


def bare_python(repeats: int) -> Times:
    """Start the interpreter alone, as often."""
    argv = [os.path.realpath(sys.executable), "-I", "-S", "-c", TRIVIAL]
    ms: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(argv, check=True, env={})
        ms.append((time.perf_counter() - started) * 1e3)
    return Times(sorted(ms))


async def call(session: Session) -> None:
    done = await session.run(TRIVIAL)
    assert done.is_ok, done


async def whole_session(sandbox: Sandbox, num_calls: int = 1) -> None:
    session = await sandbox.open_python()
    try:
        for _ in range(num_calls):
            await call(session)
    finally:
        await session.close()


async def program(sandbox: Sandbox) -> None:
    done = await sandbox.run_program(["python", "-c", TRIVIAL])
    assert done.is_ok, done


async def measure_pool(sandbox: Sandbox, kind: str, asked: argparse.Namespace) -> dict[str, Times]:
    """Measure sessions and programs of a sandbox that keeps some guests ready, or none."""
    pause_s = asked.pause_s if kind == "warm" else 0.0
    await whole_session(sandbox)
    await asyncio.sleep(1.0)
    opened: list[Session] = []

    async def first_call() -> None:
        opened.append(await sandbox.open_python())
        await call(opened[-1])

    first = await measure(first_call, asked.repeats, pause_s)
    for session in opened:
        await session.close()
    return {
        f"first call, {kind}": first,
        f"session, {kind}": await measure(lambda: whole_session(sandbox), asked.repeats, pause_s),
        f"program, {kind}": await measure(lambda: program(sandbox), asked.repeats, pause_s),
    }


async def measure_together(sandbox: Sandbox, num_sessions: int) -> float:
    """Run many sessions at once; seconds."""
    started = time.perf_counter()
    await asyncio.gather(*(whole_session(sandbox, CALLS_TOGETHER) for _ in range(num_sessions)))
    return time.perf_counter() - started


async def measure_provider(name: str, asked: argparse.Namespace, unit_ms: float) -> None:
    def make(num_warm: int) -> Sandbox:
        keys = {"provider": name, "trusted": True, "num_warm": num_warm}
        return make_sandbox(SandboxConfig.model_validate(keys))

    warm, cold = make(2), make(0)
    try:
        session = await cold.open_python()
        await call(session)
        found = {"call": await measure(lambda: call(session), 10 * asked.repeats, 0.0)}
        found |= await measure_pool(warm, "warm", asked)
        found |= await measure_pool(cold, "cold", asked)
        together_s = await measure_together(cold, asked.sessions)
    finally:
        await warm.close()
        await cold.close()
    print(f"{name}:")
    for what, times in found.items():
        print(times.line(what, unit_ms))
    calls = asked.sessions * CALLS_TOGETHER
    print(
        f"{together_s:9.2f} s, {calls / together_s:.0f} calls/s: {asked.sessions} sessions at once"
    )
    is_held = "held" if found["call"].p50 < BOUND_MS else "missed"
    print(f"   the aim of {BOUND_MS:.0f} ms for a trivial call is {is_held}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What running a model's code costs.")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--pause-s", type=float, default=0.2)
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS)
    asked = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"Linux {platform.release()}, Python {platform.python_version()}, load {os.getloadavg()}")
    bare = bare_python(asked.repeats)
    print(bare.line("bare python -I -S -c, by subprocess.run", bare.p50))
    for name in asked.providers:
        reason = None if name == "subprocess" else unavailable_reason(name)
        if reason is None:
            asyncio.run(measure_provider(name, asked, bare.p50))
        else:
            print(f"{name}: {reason}")


if __name__ == "__main__":
    main()
