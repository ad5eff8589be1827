"""What the rollout itself costs: CPU time a turn, and wall time over the critical path.

512 requests (64 prompts, groups of 8) of 4 turns. The policy is scripted: three turns of about 100
tokens that call a tool, then an answer. An observation has 200 tokens. The tokenizer is that of
Qwen2.5; template, parser, budgets, time-outs, watchdog and token check are those of a run that
configures nothing but `rollout.max_concurrent_requests: 512`.

1. CPU a turn. Engine and tool answer at once. What counts is the CPU time of the whole process, all
   threads and the collector's in it, from the making of the requests to the end of the last one,
   over the number of turns. The tokenizer's own time is that of a bare loop in the same process
   which calls the tokenizers library once for each text: it encodes the words of every prompt (once
   for a group) and of every observation, and decodes every completion. What is above it is the
   rollout's overhead. The rollout encodes texts that come up together in one call, which takes the
   library less time; a second bare loop does as much, and is printed beside the first. All are
   measured in turn, and the fastest counts, as other load slows all of them.
2. Wall time. The engine takes 1 s a turn, the tool a lognormal time (median 0.5 s, sigma 1). What
   counts is the wall time over the larger of the critical path (the longest sum of one request's
   own waits) and the tokenizer's own time.
3. Parts. Where the overhead comes from: each part alone, in a loop over the same work, without what
   the tokenizer does in it. In such a loop the processor's caches hold all that a part needs; in a
   rollout they do not, which is much of what is left over.

Expectation: an overhead of at most 150 us a turn and a ratio of at most 1.10 on an idle machine.

Run: python benchmarks/rollout_overhead.py [--tokenizer FOLDER_OR_HUB_NAME] [--requests N]
    [--turns N] [--observation-tokens N] [--seed N] [--repeats N]
"""

import argparse
import asyncio
import gc
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout_work import SCHEMA, Bench, Sizes, check_outcome

from agentrl.rollout import AsyncRolloutRequest
from agentrl.rollout.scheduling import rare_gc
from agentrl.rollout.seeding import turn_seed
from agentrl.rollout.tool_calls import check_calls
from agentrl.tools.runtime.session import ToolSession

OVERHEAD_BOUND_US, RATIO_BOUND = 150.0, 1.10


class CollectorClock:
    """How long the garbage collector works; a context manager."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> "CollectorClock":
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        self.seconds += time.process_time() * (1 if phase == "stop" else -1)


def cpu_s(work: Callable[[], object]) -> float:
    """CPU time of the process while it does some work, in seconds."""
    started = time.process_time()
    work()
    return time.process_time() - started


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured, in seconds of all turns together."""

    rollout_s: float
    collector_s: float
    """Of `rollout_s`."""
    tokenizer_s: float
    together_s: float
    """The tokenizer's, where texts are encoded together."""


def measure_cpu(bench: Bench, repeats: int) -> Figures:
    """Measure the rollout and the bare loops in turn; the fastest of each."""
    found: list[Figures] = []
    for _ in range(repeats):
        manager = bench.make_manager(waits=False)
        with CollectorClock() as collector:
            rollout_s = cpu_s(lambda m=manager: bench.roll_out(m))
        bare_s = cpu_s(bench.use_tokenizer), cpu_s(bench.use_tokenizer_together)
        found.append(Figures(rollout_s, collector.seconds, *bare_s))
    fastest = min(found, key=lambda figures: figures.rollout_s)
    return replace(
        fastest,
        tokenizer_s=min(figures.tokenizer_s for figures in found),
        together_s=min(figures.together_s for figures in found),
    )


def measure_wall(bench: Bench) -> float:
    """Wall time of a rollout in which engine and tool take their time."""
    manager = bench.make_manager(waits=True)
    started = time.perf_counter()
    finished = bench.roll_out(manager)
    seconds = time.perf_counter() - started
    check_outcome(finished, bench.sizes)
    return seconds


class Parts:
    """What a rollout consists of: for each part, a function that does it for every turn.

    What the tokenizer does is left out of them.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._wording: dict[str, Callable[[], Sequence[str]]] = {}
        self._manager = bench.make_manager(waits=False)
        self._context = self._manager.context
        self._manager.context = replace(self._context, check_tokens=self._keep_wording)
        self._finished = bench.roll_out(self._manager)
        decode = bench.template.decode
        self._texts = [decode(ids[:-1]) for e in bench.episodes for ids in e.completions]
        self._shown = bench.template.encode_texts([look.observation for look in bench.lookups])

    def _keep_wording(
        self, request: AsyncRolloutRequest, wording: Callable[[], Sequence[str]]
    ) -> None:
        self._wording[request.request_id] = wording

    def seconds(self, repeats: int) -> dict[str, float]:
        """CPU time of each part, the fastest of some."""
        parts: dict[str, Callable[[], object]] = {
            "requests": self._requests,
            "seeds": self._seeds,
            "scripted engine": lambda: self._all_at_once(self._engine),
            "ledger": self._ledger,
            "parsing, schemas": self._parsing,
            "tool calls": lambda: self._all_at_once(self._calls),
            "tools' lives": lambda: self._all_at_once(self._lives),
            "observations": self._observations,
            "token check": self._check,
        }
        return {name: min(cpu_s(part) for _ in range(repeats)) for name, part in parts.items()}

    def _requests(self) -> None:
        self._bench.make_requests(self._manager)

    def _seeds(self) -> None:
        for request in self._finished:
            for _ in range(request.num_assistant_turns):
                turn_seed(request)

    async def _engine(self, request: AsyncRolloutRequest) -> None:
        for _ in range(request.num_assistant_turns):
            await self._context.engine.generate(
                request.input_ids, request.sampling, request_id=request.request_id
            )

    def _ledger(self) -> None:
        for done in self._finished:
            ids, log_probs = done.response_ids, done.rollout_log_probs
            request = AsyncRolloutRequest(messages=[], budgets=done.budgets)
            request.begin(done.prompt_ids)
            for turn in done.turns:
                own = slice(turn.start, turn.end)
                if turn.role == "assistant":
                    versions = turn.weight_versions
                    request.append_sampled(ids[own], log_probs[own], weight_versions=versions)
                else:
                    request.append_observed(ids[own], role=turn.role)

    def _parsing(self) -> None:
        for text in self._texts:
            check_calls(self._context.parser.parse(text, tools=[SCHEMA]), [SCHEMA])

    async def _calls(self, request: AsyncRolloutRequest) -> None:
        session = ToolSession({"search": self._bench.tool}, instance_id=request.request_id)
        for message in request.messages:
            for call in message.tool_calls or ():
                await session.execute([call])

    async def _lives(self, request: AsyncRolloutRequest) -> None:
        session = ToolSession({"search": self._bench.tool}, instance_id=request.request_id)
        await session.create()
        await session.calc_rewards()
        await session.release()

    def _all_at_once(
        self, part: Callable[[AsyncRolloutRequest], Coroutine[Any, Any, None]]
    ) -> None:
        async def run() -> None:
            await asyncio.gather(*map(part, self._finished))

        asyncio.run(run())

    def _observations(self) -> None:
        encoded = iter(self._shown)
        for request in self._finished:
            said = [turn for turn in request.turns if turn.role == "assistant"]
            answers = [message for message in request.messages if message.role == "tool"]
            for turn, message in zip(said, answers, strict=False):
                last_ids = request.response_ids[turn.end - 1 : turn.end]
                planned = self._bench.template.plan_delta([message], tools=request.tool_schemas)
                assert len(planned.outside) == 1
                planned.encode(last_ids, [next(encoded)])

    def _check(self) -> None:
        for request in self._finished:
            self._context.check_tokens(request, self._wording[request.request_id])


def report(bench: Bench, figures: Figures, wall_s: float, parts: dict[str, float]) -> None:
    def us(seconds: float) -> float:
        return seconds / bench.sizes.num_turns * 1e6

    overhead_s = figures.rollout_s - figures.tokenizer_s
    print(f"{us(figures.rollout_s):7.0f} us a turn: CPU time of the rollout")
    print(f"{us(figures.tokenizer_s):7.0f} us: the tokenizer alone, text by text")
    print(f"{us(figures.together_s):7.0f} us: the tokenizer alone, texts of one moment together")
    print(
        f"{us(overhead_s):7.0f} us: overhead (at most {OVERHEAD_BOUND_US:.0f} is expected), of it"
    )
    for name, seconds in parts.items():
        print(f"{us(seconds):15.1f} us  {name}")
    print(f"{us(figures.collector_s):15.1f} us  garbage collection")
    rest_s = figures.rollout_s - figures.together_s - figures.collector_s - sum(parts.values())
    print(f"{us(rest_s):15.1f} us  the rest: runner, event loop, cold caches")
    print(f"{us(figures.together_s - figures.tokenizer_s):15.1f} us  texts encoded together")
    critical_s = max(episode.wait_s for episode in bench.episodes)
    ratio = wall_s / max(critical_s, figures.tokenizer_s)
    print(f"{wall_s:7.2f} s of wall time, {critical_s:.2f} s on the critical path")
    print(f"{ratio:7.3f} ratio (at most {RATIO_BOUND:.2f} is expected)")
    print(f"   load: {os.getloadavg()}, {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the rollout itself costs.")
    parser.add_argument("--tokenizer", default="../shared/data/tokenizers/qwen2_5")
    parser.add_argument("--requests", type=int, default=Sizes.requests)
    parser.add_argument("--turns", type=int, default=Sizes.turns)
    parser.add_argument("--observation-tokens", type=int, default=Sizes.observation_tokens)
    parser.add_argument("--seed", type=int, default=Sizes.seed)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    sizes = Sizes(asked.requests, asked.turns, asked.observation_tokens, seed=asked.seed)
    bench = Bench(asked.tokenizer, sizes)
    check_outcome(bench.roll_out(bench.make_manager(waits=False)), sizes)
    with rare_gc():  # as round a training run
        figures = measure_cpu(bench, asked.repeats)
    parts = Parts(bench).seconds(asked.repeats)
    report(bench, figures, measure_wall(bench), parts)


if __name__ == "__main__":
    main()
