"""The critic's loss. Shapes: B sequences, T response positions."""

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.ratio import where_trained


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    *,
    scale: LossScale | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit the values to the returns, and let none move far in one update.

    A token's loss is max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    Source: Schulman et al. 2016 (arXiv 1506.02438), section 5, for the fit; the clip is that of
    PPO's first implementation (Engstrom et al. 2020, 2005.12729, section 3).

    Args:
        vpreds: `[B, T]`, predicted now, with gradient.
        returns: `[B, T]`, what is fitted.
        values: `[B, T]`, predicted before the update.
        response_mask: `[B, T]`, nonzero where a token is trained.
        cliprange_value: c, in units of the return.
        loss_agg_mode: See `agentrl.algorithms.aggregation`.
        scale: The mini-batch's denominators; None: these rows are the whole mini-batch.

    Returns:
        One micro-batch's part of the loss, and of the share of tokens whose value is clipped.
    """
    mask = response_mask.bool()
    scale = scale or LossScale.of(mask)
    vpreds, returns, values = (where_trained(each, mask) for each in (vpreds, returns, values))
    near = torch.maximum(torch.minimum(vpreds, values + cliprange_value), values - cliprange_value)
    free, clipped = (vpreds - returns).square(), (near - returns).square()
    loss = 0.5 * scale.aggregate(torch.maximum(free, clipped), mask, loss_agg_mode)
    return loss, scale.mean((clipped > free).float(), mask)
