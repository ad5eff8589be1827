"""Ragged batches of tensors with observations inside, generated."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st


class Rows(NamedTuple):
    rewards: torch.Tensor
    mask: torch.Tensor
    index: np.ndarray
    in_baseline: torch.Tensor


@st.composite
def masks(draw, max_rows=6, max_width=7) -> torch.Tensor:
    """Masks `[B, T]` of zeros and ones in any order, fully masked rows among them."""
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, max_width))
    bits = draw(st.lists(st.integers(0, 1), min_size=rows * width, max_size=rows * width))
    return torch.tensor(bits).view(rows, width)


@st.composite
def ragged_rows(draw, quarters=False) -> Rows:
    """Rewards, masks, groups; with `quarters` the rewards are few and sums of them exact."""
    mask = draw(masks())
    number = st.integers(-3, 3).map(lambda n: n / 4) if quarters else st.floats(-5, 5, width=32)
    count = mask.numel()
    rewards = torch.tensor(draw(st.lists(number, min_size=count, max_size=count)))
    uids = draw(st.lists(st.sampled_from("abc"), min_size=len(mask), max_size=len(mask)))
    counted = draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask)))
    return Rows(rewards.view(mask.shape), mask, np.array(uids, dtype=object), torch.tensor(counted))


def insert_masked(data: st.DataObject, rows: Rows) -> tuple[Rows, torch.Tensor]:
    """Put masked tokens with rewards on them anywhere. Returns where the old tokens are now."""
    num_rows, width = rows.mask.shape
    wider = width + 4
    places = torch.stack(
        [
            torch.tensor(sorted(data.draw(st.permutations(range(wider)))[:width]))
            for _ in range(num_rows)
        ]
    )
    rewards = torch.full((num_rows, wider), 7.0).scatter(1, places, rows.rewards)
    mask = torch.zeros(num_rows, wider, dtype=rows.mask.dtype).scatter(1, places, rows.mask)
    return rows._replace(rewards=rewards, mask=mask), places
