"""Random ragged batches with observations inside the responses."""

from dataclasses import dataclass

import numpy as np
import torch

NUM_GROUPS, WIDTH = 6, 48


@dataclass(frozen=True, slots=True)
class Batch:
    """What a group estimator reads. B rows, T positions."""

    rewards: torch.Tensor
    """`[B, T]` float32."""
    mask: torch.Tensor
    """`[B, T]` int64: trained tokens; spans of observations between them, padding behind."""
    attention_mask: torch.Tensor
    """`[B, T]` int64: tokens."""
    index: np.ndarray
    """`[B]`: the group."""


def make_batch(seed: int, *, group_size: int = 5) -> Batch:
    """Lay out rows of interleaved groups: rewards on several tokens, no two scores alike."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = NUM_GROUPS * group_size
    lengths = torch.randint(4, WIDTH + 1, (num_rows, 1), generator=generator)
    attention_mask = (torch.arange(WIDTH) < lengths).long()
    # Spans of eight: a turn of the model, then what it hears. The first span is always the model's.
    is_observed = torch.rand(num_rows, WIDTH // 8, generator=generator).lt(0.4)
    is_observed[:, 0] = False
    mask = attention_mask * (~is_observed.repeat_interleave(8, dim=-1)).long()
    rewards = torch.randn(num_rows, WIDTH, generator=generator) * mask
    rewards = rewards * torch.rand(num_rows, WIDTH, generator=generator).lt(0.3)
    rewards[:, 0] += torch.rand(num_rows, generator=generator)
    names = np.array([f"prompt-{n % NUM_GROUPS}" for n in range(num_rows)], dtype=object)
    return Batch(rewards, mask, attention_mask, names)
