"""Items of unlike length -> parts of like sums: rows to micro-batches, or to ranks.

Longest first, each to the part that holds the least so far: the largest part is at most a third
larger than in the best partition, in n log n steps. Differencing (Karmarkar and Karp) makes the
largest part a few thousandths smaller, and takes hundreds of times as long
(`benchmarks/partition.py` prints both).
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence


def partition_balanced(
    lengths: Sequence[int],
    num_parts: int,
    *,
    groups: Sequence[Hashable] | None = None,
    equal_counts: bool = False,
) -> list[list[int]]:
    """Deal items to parts whose sums differ as little as longest-first dealing makes them.

    Equal arguments give equal parts.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": the largest sum is at most
    4/3 - 1/(3 num_parts) of the best one, where neither groups nor counts are asked for.

    Args:
        lengths: Of the items, none negative.
        num_parts: Parts, at least one.
        groups: The group of each item: a group's items come to one part. None: each for itself.
        equal_counts: Whether the parts' numbers of items (of groups, where there are any) may
            differ by one at most. Sums then balance less.

    Returns:
        `num_parts` lists of indices into `lengths`; some are empty where there are fewer items.

    Example:
        >>> partition_balanced([5, 3, 3, 1], 2)
        [[0, 3], [1, 2]]
        >>> partition_balanced([5, 3, 3, 1], 2, groups=["a", "a", "b", "b"])
        [[0, 1], [2, 3]]
    """
    units = _gather_units(len(lengths), groups)
    sums = [sum(lengths[item] for item in unit) for unit in units]
    dealt = _deal_evenly(sums, num_parts) if equal_counts else _deal(sums, num_parts)
    return [[item for unit in part for item in units[unit]] for part in dealt]


def _gather_units(count: int, groups: Sequence[Hashable] | None) -> list[list[int]]:
    """The items that are dealt together, in the order of the first of each."""
    if groups is None:
        return [[item] for item in range(count)]
    units: dict[Hashable, list[int]] = defaultdict(list)
    for item, group in zip(range(count), groups, strict=True):
        units[group].append(item)
    return list(units.values())


def _longest_first(sums: Sequence[int]) -> list[int]:
    return sorted(range(len(sums)), key=lambda unit: -sums[unit])


def _deal(sums: Sequence[int], num_parts: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part) for part in range(num_parts)]
    for unit in _longest_first(sums):
        load, part = heap[0]
        parts[part].append(unit)
        heapq.heapreplace(heap, (load + sums[unit], part))
    return parts


def _deal_evenly(sums: Sequence[int], num_parts: int) -> list[list[int]]:
    """Deal in rounds: each part gets one unit of a round, the longest to that with the least."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    order = _longest_first(sums)
    for start in range(0, len(order), num_parts):
        by_load = sorted(range(num_parts), key=lambda part: (loads[part], part))
        for unit, part in zip(order[start : start + num_parts], by_load, strict=False):
            parts[part].append(unit)
            loads[part] += sums[unit]
    return parts
