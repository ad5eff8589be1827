"""Figures that can be put together: those of two parts of a batch give exactly those of the whole.

A rank measures its own rows. A mean of means would be wrong where the ranks averaged over unlike
numbers of tokens, turns or scored rows; so a figure keeps what it was computed from until the parts
of all ranks have been merged, and only then becomes a number.

    Mean                 a sum and what it is divided by
    Largest, Smallest    NaN where any part is
    Total                a sum
    Deviation            a standard deviation
    Percentile           the values themselves
    Rate                 amounts add up, the seconds are those of the slowest; for each rank
    Share                of named things (groups), which several parts may know in part
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

Metrics = dict[str, float]
"""Flat names and numbers: what a tracker logs."""


class Figure(Protocol):
    """A number in the making."""

    def merge(self, other: Self) -> Self:
        """Give the figure of both parts together."""
        ...

    @property
    def value(self) -> float:
        """The number."""
        ...


Figures = dict[str, Figure]
"""Figures by flat name. One over nothing is left out."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum over a count; the count is not 0."""

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
class Largest:
    """The largest of some values."""

    value: float

    def merge(self, other: Self) -> Self:
        """Take the larger; NaN whichever of them is."""
        return type(self)(_first_nan(self.value, other.value) or max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest of some values."""

    value: float

    def merge(self, other: Self) -> Self:
        """Take the smaller; NaN whichever of them is."""
        return type(self)(_first_nan(self.value, other.value) or min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Total:
    """A sum."""

    value: float

    def merge(self, other: Self) -> Self:
        """Add."""
        return type(self)(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Deviation:
    """A standard deviation, n in the denominator."""

    count: float
    mean: float
    squares: float
    """Sum of the squared distances from the mean."""

    @classmethod
    def of(cls, values: torch.Tensor) -> Self:
        """Measure values, at least one, in float64."""
        values = values.double()
        mean = values.mean()
        return cls(values.numel(), mean.item(), (values - mean).square().sum().item())

    def merge(self, other: Self) -> Self:
        """Move both sums of squares to the common mean."""
        count = self.count + other.count
        apart = other.mean - self.mean
        return type(self)(
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart**2 * self.count * other.count / count,
        )

    @property
    def value(self) -> float:
        """The deviation."""
        return math.sqrt(self.squares / self.count)


@dataclass(frozen=True, slots=True)
class Percentile:
    """The value that a share of all values does not exceed; it is one of them."""

    values: tuple[float, ...]
    share: float

    def merge(self, other: Self) -> Self:
        """Keep all values."""
        return type(self)(self.values + other.values, self.share)

    @property
    def value(self) -> float:
        """The value at the place."""
        return sorted(self.values)[math.ceil(self.share * len(self.values)) - 1]


@dataclass(frozen=True, slots=True)
class Rate:
    """An amount by time and rank."""

    amount: float
    seconds: float
    """More than 0."""
    num_ranks: int = 1

    def merge(self, other: Self) -> Self:
        """Add the amounts; the slower one decides the time."""
        return type(self)(
            self.amount + other.amount,
            max(self.seconds, other.seconds),
            self.num_ranks + other.num_ranks,
        )

    @property
    def value(self) -> float:
        """The amount a second, of each rank."""
        return self.amount / self.seconds / self.num_ranks


@dataclass(frozen=True, slots=True)
class Share:
    """The share of named things that nothing speaks against."""

    refuted: Mapping[str, bool]
    """By name, whether something does."""

    def merge(self, other: Self) -> Self:
        """What one part knows to be refuted is so."""
        names = self.refuted.keys() | other.refuted.keys()
        return type(self)(
            {name: self.refuted.get(name, False) or other.refuted.get(name, False)
             for name in names}
        )  # fmt: skip

    @property
    def value(self) -> float:
        """The share."""
        return sum(not is_refuted for is_refuted in self.refuted.values()) / len(self.refuted)


def merge_figures(parts: Iterable[Mapping[str, Figure]]) -> Figures:
    """Put the figures of several ranks together, name by name.

    A figure that only some ranks have is theirs alone.
    """
    merged: Figures = {}
    for part in parts:
        for name, figure in part.items():
            merged[name] = merged[name].merge(figure) if name in merged else figure
    return merged


def to_metrics(figures: Mapping[str, Figure]) -> Metrics:
    """Turn figures into the numbers that are logged."""
    return {name: figure.value for name, figure in figures.items()}


def spread(name: str, values: Sequence[float]) -> Figures:
    """Describe values by mean, largest and smallest; nothing where there are none."""
    if not values:
        return {}
    return {
        f"{name}/mean": Mean.of(values),
        f"{name}/max": Largest(float(max(values))),
        f"{name}/min": Smallest(float(min(values))),
    }


def tail(name: str, values: Sequence[float]) -> Figures:
    """Describe values by mean, 95th percentile and largest; nothing where there are none."""
    if not values:
        return {}
    return {
        f"{name}/mean": Mean.of(values),
        f"{name}/p95": Percentile(tuple(values), 0.95),
        f"{name}/max": Largest(max(values)),
    }


def tensor_spread(name: str, values: torch.Tensor) -> Figures:
    """Describe a tensor's values as `spread` does, in float64."""
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{name}/mean": Mean(values.sum().item(), values.numel()),
        f"{name}/max": Largest(values.max().item()),
        f"{name}/min": Smallest(values.min().item()),
    }


def _first_nan(*values: float) -> float | None:
    return next((value for value in values if math.isnan(value)), None)
