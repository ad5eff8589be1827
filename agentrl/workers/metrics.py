"""Numbers of an update whose parts add up over micro-batches and ranks."""

import math
from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from agentrl.workers.distributed import World


class MetricSums:
    """Sums by flat metric name. A part is a share of a mean, so parts only ever add."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[Tensor | float]] = defaultdict(list)

    def add(self, parts: Mapping[str, Tensor | float]) -> None:
        """Add a micro-batch's parts. Tensors are read only when the sums are."""
        for name, part in parts.items():
            self._parts[name].append(part)

    def totals(self, world: World) -> dict[str, float]:
        """Sum over everything added on all ranks. A collective."""
        mine = {name: math.fsum(map(float, parts)) for name, parts in self._parts.items()}
        totals: defaultdict[str, float] = defaultdict(float)
        for one in world.gather(mine):
            for name, value in one.items():
                totals[name] += value
        return dict(totals)


def mean_by_name(steps: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the steps that have it."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            by_name[name].append(value)
    return {name: math.fsum(values) / len(values) for name, values in by_name.items()}
