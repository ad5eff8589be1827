"""The figures of several ranks become those of the run, by a rule that each name states.

| name                          | merged as                                  |
| ----------------------------- | ------------------------------------------ |
| `timing_s/*`, `perf/max_*`    | largest: the slowest rank is the step      |
| ends in `/max`, `_max`        | largest                                    |
| ends in `/min`, `_min`        | smallest                                   |
| `*/num_*`, `perf/total_*`     | sum                                        |
| everything else               | mean, weighted by each rank's weight       |
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class RankMetrics(NamedTuple):
    """What one rank measured, and how much it weighs in a mean."""

    metrics: Mapping[str, float]
    weight: float = 1.0
    """The rank's number of rows (or tokens, where the figures are means over tokens)."""


_LARGEST = re.compile(r"^(timing_s|perf/max_.*)(/|$)|[/_]max$")
_SMALLEST = re.compile(r"[/_]min$")
_SUM = re.compile(r"(^|/)num_[^/]+$|^perf/total_[^/]+$")


def merge_metrics(parts: Sequence[RankMetrics]) -> dict[str, float]:
    """Reduce the figures of several ranks to those of the run, by the names' rules (see the top).

    A figure that only some ranks have is reduced over those. A mean is exact where the weight is
    what the ranks averaged over. Ranks of weight 0 have no say in a mean, unless all weigh 0.
    """
    gathered: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for part in parts:
        for name, value in part.metrics.items():
            gathered[name].append((value, part.weight))
    return {name: _reduce(name, pairs) for name, pairs in gathered.items()}


def _reduce(name: str, pairs: Sequence[tuple[float, float]]) -> float:
    values = [value for value, _ in pairs]
    if any(math.isnan(value) for value in values):
        return math.nan  # `max` would drop it or not by the order of the ranks
    if _LARGEST.search(name):
        return max(values)
    if _SMALLEST.search(name):
        return min(values)
    if _SUM.search(name):
        return sum(values)
    total = sum(weight for _, weight in pairs)
    if total == 0:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in pairs if weight) / total
