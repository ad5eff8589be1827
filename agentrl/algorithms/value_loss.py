"""The loss of a critic. Shapes: B rows, T response positions."""

from typing import NamedTuple

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.token_loss import where_trained
from agentrl.config.schema.training import LossAggMode


class ValueLoss(NamedTuple):
    """A micro-batch's part of the value loss of its mini-batch."""

    loss: torch.Tensor
    """Scalar with gradient."""
    clip_frac: torch.Tensor
    """Part of the share of the tokens of which the clip decides the loss."""


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: LossAggMode = "token-mean",
    *,
    scale: LossScale | None = None,
) -> ValueLoss:
    """Compute half of the squared error of values, clipped to a range around the old values.

    L[t] = max((V[t] - R[t])^2, (clip(V[t], V_old[t] - c, V_old[t] + c) - R[t])^2) / 2. A value that
    has moved toward its return by more than c has no gradient.

    Source: Schulman et al. 2016 (arXiv 1506.02438), section 5, for the fit; the clip is that of
    PPO's first implementation (Engstrom et al. 2020, 2005.12729, section 3).

    Args:
        vpreds: `[B, T]`, with gradient.
        returns: `[B, T]`, what the critic learns.
        values: `[B, T]`, of the critic before the update.
        response_mask: `[B, T]`, nonzero at trained tokens.
        cliprange_value: c, in units of the return.
        loss_agg_mode: How the losses of tokens become one number.
        scale: The denominators of the mini-batch; None: the rows are the whole mini-batch.
    """
    scale = scale or LossScale.of(response_mask)
    vpreds, returns, values = (
        where_trained(column, response_mask) for column in (vpreds, returns, values)
    )
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    free_loss, clipped_loss = (vpreds - returns).square(), (clipped - returns).square()
    losses = torch.maximum(free_loss, clipped_loss)
    loss = 0.5 * scale.aggregate(losses, response_mask, loss_agg_mode)
    return ValueLoss(loss, scale.mean((clipped_loss > free_loss).to(losses), response_mask))


def compute_explained_variance(
    values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor
) -> float:
    """Compute the share of the returns' variance that the values explain, over trained tokens.

    1 - var(R - V) / var(R): 1 if the critic is perfect, 0 if it is no better than a constant, and
    below 0 if it is worse. 0 if all returns are equal.

    Args:
        values: `[B, T]`.
        returns: `[B, T]`.
        response_mask: `[B, T]`, nonzero at trained tokens.
    """
    inside = response_mask.bool()
    learned, known = returns[inside].double(), values[inside].double()
    if not len(learned) or torch.equal(*learned.aminmax()):
        return 0.0
    return 1.0 - float((learned - known).var(correction=0) / learned.var(correction=0))
