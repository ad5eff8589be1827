"""What `rollout.deterministic` costs in speed: rounds against requests that run free.

The work is that of `benchmarks/engine.py`: 256 concurrent episodes, prompts of 120 to 250 tokens,
about 25 sampled tokens a turn and 10 observed ones between turns, with the small policy of the
quick start; here of 2 to 4 turns each. Behind each turn but the last a tool takes its time: none,
or a lognormal one (median 0.2 s, sigma 1), the same for a turn of an episode in every run. The same
episodes are driven through both schedulers of the rollout: `ConcurrentScheduler`, and
`LockstepScheduler` with
the kernels that the mode chooses.

What to expect: a round lasts as long as its longest completion and its slowest tool, so the cost
grows with the spread of both. Without latencies the forward passes of a round's end are smaller;
with them the engine stands still while the slowest of all tools is at work, and the wall time nears
the sum over the turns of the slowest tool's time. The runs are made in turn, and the fastest of
each counts, as other load slows all. Printed too is whether the runs of a kind agreed to the last
bit of every log-probability: in rounds they must.

Run: python benchmarks/determinism.py [repeats]
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.engines import Engine, SamplingParams, TransformersEngine
from agentrl.rollout.scheduling import ConcurrentScheduler, LockstepScheduler, Scheduler

NUM_EPISODES, NUM_OBSERVED, VOCAB_SIZE = 256, 10, 600
TOOL_MEDIAN_S, TOOL_SIGMA = 0.2, 1.0

Open = Callable[[Engine], AbstractAsyncContextManager[Scheduler]]


@dataclass(frozen=True)
class Episode:
    """One conversation: its prompt, what each turn samples, what is observed behind it."""

    prompt: list[int]
    budgets: list[int]
    observed: list[int]
    tools_s: list[float]
    """How long the tool behind each turn takes; the last turn has none."""


@dataclass(frozen=True)
class Run:
    """What one drive of all episodes gave."""

    seconds: float
    log_probs: list[list[float]]


def make_episodes() -> list[Episode]:
    generator, latencies = torch.Generator().manual_seed(0), random.Random(0)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    system = integers(0, VOCAB_SIZE, 78)
    lengths, turns = integers(120, 251, NUM_EPISODES), integers(2, 5, NUM_EPISODES)
    return [
        Episode(
            prompt=system + integers(0, VOCAB_SIZE, length - len(system)),
            budgets=integers(15, 36, number),
            observed=integers(0, VOCAB_SIZE, NUM_OBSERVED),
            tools_s=[
                TOOL_MEDIAN_S * latencies.lognormvariate(0, TOOL_SIGMA) for _ in range(number - 1)
            ],
        )
        for length, number in zip(lengths, turns, strict=True)
    ]


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


async def drive(engine: Engine, episodes: list[Episode], enter: Open, latency: float) -> Run:
    """Run every episode to its end; `latency` scales the tools' times."""

    async def run(place: int, episode: Episode, admission: Scheduler) -> list[float]:
        history, log_probs = list(episode.prompt), list[float]()
        async with admission.seat(place) as source:
            for turn, budget in enumerate(episode.budgets):
                sampling = SamplingParams(max_new_tokens=budget, seed=10 * place + turn)
                done = await source.generate(history, sampling, request_id=str(place))
                history += done.token_ids + episode.observed
                log_probs += done.log_probs
                if turn < len(episode.tools_s):
                    await asyncio.sleep(latency * episode.tools_s[turn])
        return log_probs

    await engine.flush_cache()
    started = time.perf_counter()
    async with enter(engine) as admission, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(run(place, episode, admission))
            for place, episode in enumerate(episodes)
        ]
    return Run(time.perf_counter() - started, [task.result() for task in tasks])


def run_free(engine: Engine) -> AbstractAsyncContextManager[Scheduler]:
    torch.use_deterministic_algorithms(False)
    return nullcontext(ConcurrentScheduler(engine, capacity=NUM_EPISODES))


def run_in_rounds(engine: Engine) -> AbstractAsyncContextManager[Scheduler]:
    torch.use_deterministic_algorithms(True)
    return LockstepScheduler(engine, num_requests=NUM_EPISODES, capacity=NUM_EPISODES)


def compare(
    runner: asyncio.Runner, engine: Engine, episodes: list[Episode], latency: float, repeats: int
) -> None:
    """Measure both admissions in turn, and print them."""
    kinds: dict[str, Open] = {"free": run_free, "rounds": run_in_rounds}
    runs: dict[str, list[Run]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, enter in kinds.items():
            runs[name].append(runner.run(drive(engine, episodes, enter, latency)))
    num_tokens = sum(sum(episode.budgets) for episode in episodes)
    best = {name: min(run.seconds for run in made) for name, made in runs.items()}
    for name, made in runs.items():
        agree = all(run.log_probs == made[0].log_probs for run in made)
        bits = "the same bits each time" if agree else "other last bits"
        print(f"{name:>8}: {best[name]:6.2f} s, {num_tokens / best[name]:7.0f} tokens/s; {bits}")
    print(f"   ratio: {best['free'] / best['rounds']:6.2f} of the speed")


def main() -> None:
    repeats = max(2, int(sys.argv[1]) if len(sys.argv) > 1 else 3)  # one has no bits to compare
    engine, episodes = TransformersEngine.from_model(make_model()), make_episodes()
    slowest = [max(e.tools_s[turn] for e in episodes if turn < len(e.tools_s)) for turn in range(3)]
    paths = [sum(episode.tools_s) for episode in episodes]
    with asyncio.Runner() as runner:
        runner.run(drive(engine, episodes, run_free, 0.0))
        print("tools that answer at once")
        compare(runner, engine, episodes, 0.0, repeats)
        print(
            f"tools that take a lognormal time (median {TOOL_MEDIAN_S} s, sigma {TOOL_SIGMA}); the "
            f"longest sum of one episode is {max(paths):.2f} s, the slowest tools of the turns "
            f"together take {sum(slowest):.2f} s"
        )
        compare(runner, engine, episodes, 1.0, repeats)
        runner.run(engine.close())
    print(f"    load: {os.getloadavg()}, {os.cpu_count()} cores, torch {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
