"""What the gateway adds to the engine: latency, throughput and CPU time of a call.

256 agents call the gateway at once, 8 times each, and send their whole history back: a tool call of
about 120 tokens and an observation of 500 tokens a turn, some 4,500 tokens at the end. The policy
is scripted and takes 1 s a call; the tool answers at once. Template and parser are those of
Qwen2.5. The agents start within the first second. They are in one other process, with a plain HTTP
client (`gateway_agents.py`), whose CPU time is not counted but takes a core from the machine.

1. Throughput: tokens per second of the agents, over those of the same calls asked of the engine
   directly, one after another for each agent, in the same run.
2. Added latency: the seconds of a call, as the agent measures them, without the engine's second.
3. CPU time of a call: of this process, all threads, over the number of calls. It has the HTTP
   server, the translation, the match of the history, the tokenizer and the ledger. That of the
   direct calls (the scripted engine and the event loop) is subtracted.

Expectation: at least 0.95 of the throughput; 256 calls a second leave 3.9 ms of one core for each.

`--attack`: 64 such agents ask, and next to them one agent posts each hostile body of
`gateway_attack.py`. For each: the longest time for which the thread of the event loop computed
between two of its iterations (CPU time of that thread, so other programs do not count), the CPU
time of the process, its memory before and after, and the answer. At most 0.1 s, and at most 10 %
more memory, are expected.

Run: python benchmarks/gateway.py [--tokenizer FOLDER_OR_HUB_NAME] [--agents N] [--turns N]
    [--observation-tokens N] [--call-s SECONDS] [--attack]
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from gateway_attack import BODIES, Hold, memory_mb, post
from rollout_work import SCHEMA, Bench, Sizes

from agentrl.agent_loops.gateway import Gateway
from agentrl.rollout import AsyncRolloutRequest, RolloutManager
from agentrl.rollout.scheduling import rare_gc

RATIO_BOUND = 0.95
AGENTS = Path(__file__).with_name("gateway_agents.py")


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of the same calls, through the gateway and directly."""

    latencies_s: list[float]
    """Of each call through the gateway."""
    wall_s: float
    direct_wall_s: float
    cpu_s: float
    direct_cpu_s: float
    num_tokens: int
    """Sampled tokens."""


def make_bench(tokenizer: str, sizes: Sizes) -> Bench:
    """Make the work, with budgets that it fits into."""
    longest = sizes.observation_tokens + 50
    return Bench(
        tokenizer,
        sizes,
        max_response_length=sizes.turns * (longest + 250),
        max_tool_response_length=longest,
    )


async def measure(bench: Bench) -> Figures:
    """Measure the gateway, and then the engine alone."""
    manager = bench.make_manager(waits=True)
    async with Gateway() as gateway:
        return await measure_at(gateway, manager, bench)


async def measure_at(gateway: Gateway, manager: RolloutManager, bench: Bench) -> Figures:
    """Measure a gateway that runs, and then the engine alone."""
    requests = bench.make_requests(manager)
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(gateway.session(request, manager.context))
            for request in requests
        ]
        jobs = [
            {
                "key": session.key,
                "start_s": bench.sizes.turn_s * number / len(requests),
                "prompt": request.messages[0].text,
                "observations": [lookup.observation for lookup in episode.lookups],
            }
            for number, (session, request, episode) in enumerate(
                zip(sessions, requests, bench.episodes, strict=True)
            )
        ]
        given = {
            "base_url": sessions[0].base_url,
            "tools": [SCHEMA.to_template()],
            "jobs": jobs,
        }
        started = time.process_time()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            AGENTS,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        written, _ = await process.communicate(json.dumps(given).encode())
        cpu_s = time.process_time() - started
        reasons = [session.stop_reason for session in sessions]
    for request, reason in zip(requests, reasons, strict=True):
        request.finish(reason)
    found = json.loads(written)
    check(requests, bench)
    started = time.process_time(), time.perf_counter()
    await ask_directly(requests, bench)
    return Figures(
        latencies_s=found["seconds"],
        wall_s=found["wall_s"],
        direct_wall_s=time.perf_counter() - started[1],
        cpu_s=cpu_s,
        direct_cpu_s=time.process_time() - started[0],
        num_tokens=sum(len(ids) for one in bench.episodes for ids in one.completions),
    )


async def attack(bench: Bench) -> None:
    """Post each hostile body next to honest agents, and print what it cost."""
    manager = bench.make_manager(waits=True)
    print(f"{'body':32} {'hold s':>8} {'CPU s':>7} {'MB':>6} {'MB after':>8}  answer")
    async with Gateway() as gateway:
        await measure_at(gateway, manager, bench)  # caches are filled, and memory is grown
        for name, (path, make) in {"none": ("", None), **BODIES}.items():
            attacked = bench.make_manager(waits=True)  # its script counts the attacker's turns only
            request = bench.make_requests(attacked)[0]
            honest = asyncio.create_task(measure_at(gateway, manager, bench))
            before, started = memory_mb(), time.process_time()
            async with gateway.session(request, attacked.context) as session, Hold() as hold:
                url, answers = f"{session.base_url}{path}", ["-"]
                if make is None:
                    await honest
                else:
                    answers = await asyncio.to_thread(post, url, session.key, make)
            cpu_s = time.process_time() - started
            await honest
            figures = f"{hold.longest_s:8.3f} {cpu_s:7.2f} {before:6.0f} {memory_mb():8.0f}"
            print(f"{name:32} {figures}  {', '.join(sorted(set(answers)))}", flush=True)


def check(requests: list[AsyncRolloutRequest], bench: Bench) -> None:
    """Refuse a run in which the sampled tokens are not those of the script, in one sequence."""
    for request, episode in zip(requests, bench.episodes, strict=True):
        sampled = [t for t in request.turns if t.role == "assistant"]
        ids = [request.response_ids[turn.start : turn.end] for turn in sampled]
        assert ids == episode.completions
        assert not request.branches


async def ask_directly(requests: list[AsyncRolloutRequest], bench: Bench) -> None:
    """Ask the engine for the same completions, with the same inputs."""
    engine = bench.make_manager(waits=True).context.engine

    async def ask(request: AsyncRolloutRequest, start_s: float) -> None:
        await asyncio.sleep(start_s)
        for turn in request.turns:
            if turn.role == "assistant":
                before = request.prompt_ids + request.response_ids[: turn.start]
                await engine.generate(before, request.sampling, request_id=request.request_id)

    delay_s = bench.sizes.turn_s / len(requests)
    await asyncio.gather(*(ask(one, delay_s * number) for number, one in enumerate(requests)))


def report(bench: Bench, figures: Figures) -> None:
    added = [1000 * (seconds - bench.sizes.turn_s) for seconds in figures.latencies_s]
    p99 = statistics.quantiles(added, n=100)[98]
    cpu_ms = 1000 * (figures.cpu_s - figures.direct_cpu_s) / bench.sizes.num_turns
    ratio = figures.direct_wall_s / figures.wall_s
    through, direct = (
        figures.num_tokens / figures.wall_s,
        figures.num_tokens / figures.direct_wall_s,
    )
    print(f"{statistics.median(added):8.1f} ms added to a call (median), {p99:.1f} ms (p99)")
    print(f"{cpu_ms:8.2f} ms of CPU time of the gateway for a call")
    print(f"{through:8.0f} tokens a second, {direct:.0f} of the engine alone")
    print(f"{ratio:8.3f} ratio (at least {RATIO_BOUND} is expected)")
    print(f"   load: {os.getloadavg()}, {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the gateway adds to the engine.")
    parser.add_argument("--tokenizer", default="../shared/data/tokenizers/qwen2_5")
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--observation-tokens", type=int, default=500)
    parser.add_argument("--call-s", type=float, default=1.0)
    parser.add_argument("--attack", action="store_true", help="one attacker and 64 agents")
    asked = parser.parse_args()
    if asked.attack:
        asked.agents = min(asked.agents, 64)
    sizes = Sizes(asked.agents, asked.turns, asked.observation_tokens, turn_s=asked.call_s)
    bench = make_bench(asked.tokenizer, sizes)
    if asked.attack:
        asyncio.run(attack(bench))
        return
    with rare_gc():  # as round a training run
        report(bench, asyncio.run(measure(bench)))


if __name__ == "__main__":
    main()
