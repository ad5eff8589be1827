"""Seconds of scoring 1,000 MATH-style answers by the process pool, over those of one process.

The answers are of eight kinds (fractions, roots, polynomials, intervals, sets, matrices, numbers
with thousands, texts), each with numbers of its own, so that no cache answers; every other one is
right. One process calls the scorer in a loop; the pool is that of the manager `prime`, its
processes running and their libraries imported, with one process for each core. The times are taken
in turns, and the smallest of each is compared.

Expectation before it was measured: a score takes some milliseconds of computer algebra and a tenth
of that for sending it to a process and back, so that `c` cores take `1 / c` of the time and a tenth
more. What keeps it from that is other work on the machine: its load is printed.

Run: python benchmarks/reward_pool.py [answers [rounds]]
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable

from agentrl.config.schema.reward import RewardConfig
from agentrl.plugins.environment import num_cores
from agentrl.rewards import RewardManager, make_reward_manager
from agentrl.rewards.math_answer import compute_score
from agentrl.rollout.request import AsyncRolloutRequest
from tests.fakes.requests import build_request, said

SLACK = 1.25
"""The aim: the time of one process over the number of cores, times this."""

Pair = tuple[str, str]
KINDS: tuple[Callable[[int, int], Pair], ...] = (
    lambda a, b: (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{2 * a}}}{{{2 * b}}}"),
    lambda a, b: (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"),
    lambda a, b: (rf"(x+{a})(x+{b})", rf"x^2+{a + b}x+{a * b}"),
    lambda a, b: (rf"[{a},{a + b})", rf"[{a}, {a + b})"),
    lambda a, b: (rf"\{{{a},{a + b}\}}", rf"\{{{a + b},{a}\}}"),
    lambda a, b: (
        rf"\begin{{pmatrix}}{a}&0\\0&{b}\end{{pmatrix}}",
        rf"\begin{{bmatrix}}{a} & 0 \\ 0 & {b}\end{{bmatrix}}",
    ),
    lambda a, b: (f"{a * 1000 + b}.0", f"{a * 1000 + b:,}"),
    lambda a, b: (rf"\frac{{\pi}}{{{a}}}+{b}", rf"{b}+\frac{{\pi}}{{{a}}}"),
)


def make_answers(count: int, seed: int) -> list[Pair]:
    """Make solutions with their ground truths."""
    draw = random.Random(seed)
    answers: list[Pair] = []
    for place in range(count):
        a, b = draw.randint(2, 9999), draw.randint(2, 9999)
        given, truth = KINDS[place % len(KINDS)](a, b)
        wrong, _ = KINDS[place % len(KINDS)](a + 1, b)
        answers.append((rf"Thus \boxed{{{wrong if place // 8 % 2 else given}}}.", truth))
    return answers


def to_requests(answers: list[Pair]) -> list[AsyncRolloutRequest]:
    """Make finished requests of them."""
    return [
        build_request(said(2, text=text), data_source="math", ground_truth=truth)
        for text, truth in answers
    ]


def score_alone(answers: list[Pair]) -> tuple[float, float]:
    """Score in this process; gives the seconds and the sum of the rewards."""
    begun = time.perf_counter()
    total = sum(compute_score("math", text, truth)["score"] for text, truth in answers)
    return time.perf_counter() - begun, total


def score_in_pool(
    manager: RewardManager, runner: asyncio.Runner, answers: list[Pair]
) -> tuple[float, float]:
    """Score by the manager."""
    requests = to_requests(answers)
    begun = time.perf_counter()
    runner.run(manager.score(requests))
    seconds = time.perf_counter() - begun
    return seconds, sum(request.reward or 0.0 for request in requests)


def main() -> None:
    """Measure, and print."""
    count, rounds = (int(text) for text in (sys.argv[1:] + ["1000", "3"][len(sys.argv) - 1 :]))
    manager, cores = make_reward_manager(RewardConfig(manager="prime")), num_cores()
    alone, pooled = [], []
    with asyncio.Runner() as runner:
        score_in_pool(manager, runner, make_answers(64, seed=-1))
        score_alone(make_answers(16, seed=-2))
        for seed in range(rounds):
            # Each side has answers of its own: the other's would be in its caches.
            alone.append(score_alone(make_answers(count, seed=2 * seed)))
            pooled.append(score_in_pool(manager, runner, make_answers(count, seed=2 * seed + 1)))
        runner.run(manager.close())
    one, many = min(alone)[0], min(pooled)[0]
    print(f"{count} answers, {cores} cores, load {os.getloadavg()[0]:.1f}")
    print(f"one process: {one:.2f} s ({1000 * one / count:.1f} ms each), pool: {many:.2f} s")
    ratio, aim = many / one, SLACK / cores
    print(f"ratio {ratio:.2f} (aim: at most {aim:.2f}); rewards {alone[0][1]:g}, {pooled[0][1]:g}")


if __name__ == "__main__":
    main()
