"""`verl.utils.model`."""

import torch


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Number the tokens of each row that a mask keeps, from 0."""
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)
