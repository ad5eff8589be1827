"""Batches of several turns, generated, with masked tokens before, within and between them."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st


class TurnRows(NamedTuple):
    """A batch, all `[B, T]` but the last two, which are `[B]`. Masked tokens hold rewards too."""

    rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    turn_ids: torch.Tensor
    state_ids: torch.Tensor
    index: np.ndarray
    in_baseline: torch.Tensor

    def turns(self, row: int) -> list[list[int]]:
        """Positions of the trained tokens of each of a row's turns, by a plain loop."""
        found: dict[int, list[int]] = {}
        for position, turn in enumerate(self.turn_ids[row].tolist()):
            if self.mask[row, position]:
                found.setdefault(turn, []).append(position)
        return list(found.values())

    def counts(self, row: int) -> bool:
        return bool(self.in_baseline[row]) and bool(self.turns(row))

    def group(self, row: int) -> list[int]:
        """Rows of the same group that count."""
        return [r for r in range(len(self.index)) if self.index[r] == self.index[row]
                and self.counts(r)]  # fmt: skip

    def returns_to_go(self, row: int, gamma: float) -> list[float]:
        """What each of a row's turns and its later ones earned."""
        earned: list[float] = []
        for turn in reversed(self.turns(row)):
            own = sum(self.rewards[row, position].item() for position in turn)
            earned.insert(0, own + gamma * (earned[0] if earned else 0.0))
        return earned

    def by_token(self, of_turns: list[list[float]]) -> torch.Tensor:
        """Lay a number for each turn of each row on the turn's trained tokens."""
        laid = torch.zeros_like(self.rewards)
        for row, numbers in enumerate(of_turns):
            for turn, number in zip(self.turns(row), numbers, strict=True):
                laid[row, turn] = number
        return laid


@st.composite
def turn_rows(draw, max_rows=6, max_turns=5) -> TurnRows:
    """Rewards are quarters, so that sums of them are exact."""
    rows = draw(st.lists(st.lists(_turns, max_size=max_turns), min_size=1, max_size=max_rows))
    width = max(1, *(sum(len(trained) for trained, _ in row) for row in rows))
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    turn_ids, state_ids = torch.full_like(mask, -1), torch.full_like(mask, -1)
    for number, row in enumerate(rows):
        position = 0
        for turn, (trained, state) in enumerate(row):
            end = position + len(trained)
            mask[number, position:end] = torch.tensor(trained)
            turn_ids[number, position:end] = turn
            state_ids[number, position:end] = state
            position = end
    size = st.lists(st.integers(-3, 3), min_size=mask.numel(), max_size=mask.numel())
    rewards, values = (torch.tensor(draw(size)).view(mask.shape) / 4 for _ in range(2))
    uids = draw(st.lists(st.sampled_from("ab"), min_size=len(rows), max_size=len(rows)))
    counted = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    index = np.array(uids, dtype=object)
    return TurnRows(rewards, values, mask, turn_ids, state_ids, index, torch.tensor(counted))


_turns = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.integers(0, 2))
"""Which tokens of a turn are trained, and the state in which it began."""
