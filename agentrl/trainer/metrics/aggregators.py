"""Metrics that can be merged: the merged metric of two parts is that of the whole batch.

Each rank measures its own rows. A mean of the ranks' means would be wrong, because ranks have
different numbers of tokens, turns and scored rows. A metric therefore keeps what its value is
computed from until the parts of all ranks are merged.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch

Metrics = dict[str, float]
"""Flat names and numbers, as they are logged."""


class Metric(Protocol):
    """A metric of one part of a batch."""

    def merge(self, other: Self) -> Self:
        """Return the metric of both parts together."""
        ...

    @property
    def value(self) -> float:
        """The number that is logged."""
        ...


MetricDict = dict[str, Metric]
"""Metrics by flat name. A metric of no values is left out."""


@dataclass(frozen=True, slots=True)
class MeanMetric:
    """A mean: a sum and a count that is not 0."""

    total: float
    count: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Average values."""
        return cls(math.fsum(values), len(values))

    def merge(self, other: Self) -> Self:
        """Add both sums and both counts."""
        return type(self)(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count


@dataclass(frozen=True, slots=True)
class MaxMetric:
    """A maximum; NaN if any part is NaN."""

    value: float

    def merge(self, other: Self) -> Self:
        """Return the larger one."""
        return type(self)(float(np.maximum(self.value, other.value)))


@dataclass(frozen=True, slots=True)
class MinMetric:
    """A minimum; NaN if any part is NaN."""

    value: float

    def merge(self, other: Self) -> Self:
        """Return the smaller one."""
        return type(self)(float(np.minimum(self.value, other.value)))


@dataclass(frozen=True, slots=True)
class SumMetric:
    """A sum."""

    value: float

    def merge(self, other: Self) -> Self:
        """Add both."""
        return type(self)(self.value + other.value)


@dataclass(frozen=True, slots=True)
class RateMetric:
    """An amount per second: of all parts, which take place at the same time."""

    amount: float
    seconds: float
    """Not 0."""

    def merge(self, other: Self) -> Self:
        """Add the amounts; the slower part ends the work."""
        return type(self)(self.amount + other.amount, max(self.seconds, other.seconds))

    @property
    def value(self) -> float:
        """The amount of one second."""
        return self.amount / self.seconds


@dataclass(frozen=True, slots=True)
class WaitMetric:
    """Share of time that parts wait for the slowest of them, on average."""

    total: float
    """Seconds of all parts together."""
    count: int
    longest: float
    """Seconds of the slowest part; not 0."""

    def merge(self, other: Self) -> Self:
        """Combine the parts."""
        longest = max(self.longest, other.longest)
        return type(self)(self.total + other.total, self.count + other.count, longest)

    @property
    def value(self) -> float:
        """The share."""
        return 1.0 - self.total / self.count / self.longest


@dataclass(frozen=True, slots=True)
class StdMetric:
    """A standard deviation, n in the denominator."""

    count: float
    mean: float
    squares: float
    """Sum of the squared distances from the mean."""

    @classmethod
    def of(cls, values: torch.Tensor) -> Self:
        """Measure at least one value, in float64."""
        values = values.double()
        mean = values.mean()
        return cls(values.numel(), mean.item(), (values - mean).square().sum().item())

    def merge(self, other: Self) -> Self:
        """Move both sums of squares to the common mean (the parallel variance formula)."""
        count = self.count + other.count
        distance = other.mean - self.mean
        squares = self.squares + other.squares + distance**2 * self.count * other.count / count
        return type(self)(count, self.mean + distance * other.count / count, squares)

    @property
    def value(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.squares / self.count)


@dataclass(frozen=True, slots=True)
class P95Metric:
    """The 95th percentile; it is one of the values."""

    values: tuple[float, ...]

    def merge(self, other: Self) -> Self:
        """Keep all values."""
        return type(self)(self.values + other.values)

    @property
    def value(self) -> float:
        """The smallest value that 95 % of the values do not exceed."""
        return sorted(self.values)[math.ceil(0.95 * len(self.values)) - 1]


@dataclass(frozen=True, slots=True)
class ZeroSignalMetric:
    """Fraction of groups without a learning signal; several ranks may have rows of one group."""

    has_signal: Mapping[str, bool]
    """By group, whether a row of it has a signal."""

    def merge(self, other: Self) -> Self:
        """A group has a signal if any part of it has one."""
        merged = dict(self.has_signal)
        for group, has_signal in other.has_signal.items():
            merged[group] = merged.get(group, False) or has_signal
        return type(self)(merged)

    @property
    def value(self) -> float:
        """The fraction."""
        return list(self.has_signal.values()).count(False) / len(self.has_signal)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> MetricDict:
    """Merge the metrics of several ranks by name; not every rank needs to have each metric."""
    merged: MetricDict = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def compute_values(metrics: Mapping[str, Metric]) -> Metrics:
    """Compute the numbers that are logged."""
    return {name: metric.value for name, metric in metrics.items()}


def mean_max_min(name: str, values: Sequence[float]) -> MetricDict:
    """Summarize values by mean, maximum and minimum; return nothing for no values."""
    if not values:
        return {}
    return {
        f"{name}/mean": MeanMetric.of(values),
        f"{name}/max": MaxMetric(float(max(values))),
        f"{name}/min": MinMetric(float(min(values))),
    }


def mean_p95_max(name: str, values: Sequence[float]) -> MetricDict:
    """Summarize values by mean, 95th percentile and maximum; return nothing for no values."""
    if not values:
        return {}
    return {
        f"{name}/mean": MeanMetric.of(values),
        f"{name}/p95": P95Metric(tuple(values)),
        f"{name}/max": MaxMetric(max(values)),
    }


def tensor_mean_max_min(name: str, values: torch.Tensor) -> MetricDict:
    """Summarize a tensor's values as `mean_max_min` does, in float64."""
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{name}/mean": MeanMetric(values.sum().item(), values.numel()),
        f"{name}/max": MaxMetric(values.max().item()),
        f"{name}/min": MinMetric(values.min().item()),
    }
