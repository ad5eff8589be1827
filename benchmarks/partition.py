"""Longest-first partition against the differencing of Karmarkar and Karp: balance and time.

8,192 lengths are put into 512 parts. They are lengths of answers: most are short, some are up to
the limit of 4,096 tokens. Imbalance is the largest part over the mean of all parts, minus one. Each
time is the smallest of several runs.

Expectation before the measurement: with 16 items per part, both are within a percent of even parts.
The differencing merges lists of 512 sums 8,192 times, and takes hundreds of times as long.

Source: Karmarkar and Karp 1982, "The differencing method of set partitioning", for many parts as
in Korf 2009, "Multi-way number partitioning", section 3.

Run: python benchmarks/partition.py [repeats]
"""

import heapq
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from agentrl.workers.packing import partition_balanced

NUM_ITEMS, NUM_PARTS, LIMIT = 8192, 512, 4096
Partition = Callable[[Sequence[int], int], list[list[int]]]


class Part(NamedTuple):
    """A part in the making."""

    load: int
    items: tuple[int, ...]


def partition_by_differencing(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Merge the two partial partitions that differ most, the full parts of one to the empty ones
    of the other, until one is left.

    Args:
        lengths: Of the items, at least one.
        num_parts: Parts.
    """
    empty = [Part(0, ())] * (num_parts - 1)
    heap = [(-length, item, [Part(length, (item,)), *empty]) for item, length in enumerate(lengths)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [
            Part(a.load + b.load, a.items + b.items)
            for a, b in zip(one, reversed(other), strict=True)
        ]
        merged.sort(key=lambda part: -part.load)
        heapq.heappush(heap, (merged[-1].load - merged[0].load, number, merged))
    return [list(part.items) for part in heap[0][2]]


def draw_lengths() -> list[int]:
    """Lengths of answers, log-normal and cut at the limit."""
    drawn = np.random.default_rng(0).lognormal(mean=6.5, sigma=0.8, size=NUM_ITEMS)
    return np.clip(drawn, 16, LIMIT).astype(int).tolist()


def imbalance(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> float:
    """The largest part over the mean of all, less one."""
    loads = [sum(lengths[item] for item in part) for part in parts]
    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))
    return max(loads) * len(loads) / sum(loads) - 1


def measure_seconds(partition: Partition, lengths: Sequence[int], repeats: int) -> float:
    """Seconds of the fastest of several runs."""
    seconds: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        partition(lengths, NUM_PARTS)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    """Print both, and their ratios."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    lengths = draw_lengths()
    greedy = measure_seconds(partition_balanced, lengths, repeats)
    differencing = measure_seconds(partition_by_differencing, lengths, max(1, repeats // 5))
    ours = imbalance(lengths, partition_balanced(lengths, NUM_PARTS))
    theirs = imbalance(lengths, partition_by_differencing(lengths, NUM_PARTS))
    print(f"{NUM_ITEMS} lengths, {NUM_PARTS} parts: the largest over the mean, less one")
    print(f"longest first         {1e3 * greedy:10.1f} ms   {ours:.3%}")
    print(f"differencing          {1e3 * differencing:10.1f} ms   {theirs:.3%}")
    print(f"differencing / longest first: {differencing / greedy:.0f} times as long, largest part "
          f"{(1 + theirs) / (1 + ours):.5f} times as large")  # fmt: skip


if __name__ == "__main__":
    main()
