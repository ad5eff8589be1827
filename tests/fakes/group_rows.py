"""Rows in groups made by hand, and what a loop over them finds."""

import statistics
from collections.abc import Callable

import numpy as np
import torch

from agentrl.algorithms import get_adv_estimator_fn
from tests.fakes.tensors import Rows

SCORES = [0.0, 1.0, 1.0, 0.0, 3.0, 0.5]
GROUPS = ["a", "a", "a", "b", "b", "b"]
LENGTHS = [1, 2, 5, 4, 1, 3]


def hand_made(scores=SCORES, groups=GROUPS, lengths=LENGTHS) -> Rows:
    """One reward on the last token of each row; after it, masked tokens."""
    width = max(lengths)
    rewards, mask = torch.zeros(len(scores), width), torch.zeros(len(scores), width).long()
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[row, length - 1] = score
        mask[row, :length] = 1
    counted = torch.ones(len(scores), dtype=torch.bool)
    return Rows(rewards, mask, np.array(groups, dtype=object), counted)


def advantages_of(name: str, rows: Rows, **settings) -> torch.Tensor:
    advantages, returns = get_adv_estimator_fn(name)(
        rows.rewards, rows.mask, rows.index, in_baseline=rows.in_baseline, **settings
    )
    assert torch.equal(advantages, returns)
    return advantages


def by_row(name: str, rows: Rows, **settings) -> list[float]:
    """The one advantage of each row, which its first token has."""
    return [round(value, 4) for value in advantages_of(name, rows, **settings)[:, 0].tolist()]


class Member:
    """A row that counts, as a loop sees it."""

    def __init__(self, rows: Rows, row: int) -> None:
        trained = [n for n, mask in enumerate(rows.mask[row].tolist()) if mask]
        self.row = row
        self.score = sum(rows.rewards[row, n].item() for n in trained)
        self.length = len(trained)


def members(rows: Rows) -> dict[str, list[Member]]:
    found: dict[str, list[Member]] = {}
    for row, uid in enumerate(rows.index):
        if rows.mask[row].any() and rows.in_baseline[row]:
            found.setdefault(uid, []).append(Member(rows, row))
    return found


def naive(rows: Rows, formula: Callable[[Member, list[Member]], float]) -> list[float]:
    """Apply a formula to each row that counts, in a group that does not score the same."""
    values = [0.0] * len(rows.index)
    for group in members(rows).values():
        if len({member.score for member in group}) > 1:
            for member in group:
                values[member.row] = formula(member, group)
    return values


def mean_of(group: list[Member]) -> float:
    return statistics.fmean(member.score for member in group)


def std_of(group: list[Member]) -> float:
    return statistics.stdev(member.score for member in group)


def assert_rows(rows: Rows, found: torch.Tensor, values: list[float]) -> None:
    expected = torch.tensor(values)[:, None] * rows.mask
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def naive_whitened(rows: Rows, values: list[float]) -> list[float]:
    """Whiten over the tokens of rows that count; what was exactly 0 stays so."""
    everyone = [member for group in members(rows).values() for member in group]
    tokens = [values[member.row] for member in everyone for _ in range(member.length)]
    if len(tokens) < 2:
        return values
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [(value - mean) / (variance + 1e-8) ** 0.5 for value in values]
