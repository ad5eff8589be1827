"""Aggregation of a loss per token to one number that does not depend on the layout of the batch.

Shapes: B sequences, T response positions.

The denominators of a loss are those of the whole mini-batch, over its micro-batches and over all
ranks. Then the losses of the micro-batches, and their gradients, *add up* to those of the
mini-batch (invariant: layout is invisible). Sequences without a trained token are not counted.

============================ ==========================================================
mode                         the loss of a mini-batch of S sequences, N trained tokens
============================ ==========================================================
`token-mean`                 sum over all tokens / N
`token-sum`                  sum over all tokens
`seq-mean-token-sum`         sum over all tokens / S
`seq-mean-token-sum-norm`    sum over all tokens / S / the response budget
`seq-mean-token-mean`        sum over sequences of each one's token mean / S
============================ ==========================================================

A trajectory may have several rows (for example if its context was folded, and each segment has a
prompt of its own). These rows count together as one sequence: each has the *row weight* tokens of
the row / tokens of the trajectory, so the number of rows has no effect (see `compute_row_weights`).
"""

from dataclasses import dataclass, replace
from typing import get_args

import torch

from agentrl.algorithms.masked import masked_sum
from agentrl.config.schema.training import LossAggMode
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The denominators of one mini-batch, for all its micro-batches on all ranks.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> whole = LossScale.of(mask)
        >>> parts = [whole.aggregate(torch.ones(1, 3), row[None], "token-mean") for row in mask]
        >>> float(sum(parts))
        1.0
    """

    batch_num_tokens: int
    """Trained tokens of the mini-batch, over all ranks."""
    global_batch_size: int
    """Sequences (trajectories) of the mini-batch with a trained token, over all ranks."""
    dp_size: int = 1
    """Ranks. FSDP2 averages gradients over them, so each rank's loss is multiplied by this."""
    loss_scale_factor: float | None = None
    """The configured response budget in tokens, for `seq-mean-token-sum-norm`."""
    row_weights: torch.Tensor | None = None
    """`[B]`, each row's share of its trajectory's tokens (see `at`); None: 1 each."""
    num_measured_tokens: int | None = None
    """Trained tokens of the rows that are computed: metrics are means over them; None: all."""
    summary: object | None = None
    """What the loss needs of the whole mini-batch (see `register_policy_loss`)."""

    @classmethod
    def of(
        cls,
        mask: torch.Tensor,
        *,
        dp_size: int = 1,
        loss_scale_factor: float | None = None,
        row_weights: torch.Tensor | None = None,
    ) -> "LossScale":
        """Count the whole mini-batch's mask `[B, T]`, of rows with the weights `[B]`."""
        return cls(
            batch_num_tokens=int(mask.bool().sum()),
            global_batch_size=round(float(count_sequences(mask.bool(), row_weights).sum())),
            dp_size=dp_size,
            loss_scale_factor=loss_scale_factor,
            row_weights=row_weights,
        )

    def at(self, rows: torch.Tensor | list[int]) -> "LossScale":
        """Return the scale of a micro-batch: the same, with the weights of its own rows.

        Args:
            rows: Indices of the micro-batch's rows in `row_weights`, in its own order.
        """
        if self.row_weights is None:
            return self
        return replace(self, row_weights=self.row_weights[rows])

    def aggregate(
        self,
        loss_mat: torch.Tensor,
        loss_mask: torch.Tensor,
        loss_agg_mode: str,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one micro-batch's part of the mini-batch's loss (see `agg_loss`).

        Args:
            loss_mat: `[b, T]`.
            loss_mask: `[b, T]`, nonzero at trained tokens.
            loss_agg_mode: One of the modes of this module's table.
            weights: `[b, T]`, factors of the tokens' losses; denominators do not contain them.
        """
        if weights is not None:
            loss_mat = loss_mat * torch.where(loss_mask.bool(), weights, 0.0)
        return agg_loss(
            loss_mat,
            loss_mask,
            loss_agg_mode,
            dp_size=self.dp_size,
            batch_num_tokens=self.batch_num_tokens,
            global_batch_size=self.global_batch_size,
            loss_scale_factor=self.loss_scale_factor,
            row_weights=self.row_weights,
        )

    def mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return one micro-batch's part of a metric: a mean over the mini-batch's computed tokens.

        The parts of all micro-batches and ranks add up to the mean. Without gradient.
        """
        count = self.num_measured_tokens
        count = self.batch_num_tokens if count is None else count
        return masked_sum(values.detach(), mask) / max(count, 1)


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Aggregate a loss per token. Values at masked positions, NaN included, have no effect.

    A batch without a trained token has the loss 0 and the gradient 0. Without counts, `loss_mat` is
    the whole mini-batch. The parameters are verl's; `LossScale.aggregate` takes fewer.

    Args:
        loss_mat: `[B, T]`.
        loss_mask: `[B, T]`, nonzero at trained tokens.
        loss_agg_mode: One of the modes of this module's table.
        dp_size: Ranks.
        batch_num_tokens: Trained tokens of the mini-batch, over all ranks.
        global_batch_size: Sequences of the mini-batch with a trained token, over all ranks.
        loss_scale_factor: The response budget in tokens, for the `norm` mode.
        row_weights: `[B]`, each row's share of its trajectory's tokens; None: 1 each.

    Raises:
        ConfigError: for an unknown mode, for several ranks without the count that the mode needs,
            and for the `norm` mode without the response budget (verl then uses the padded length,
            which changes from batch to batch).
    """
    mask = loss_mask.bool()
    sums = torch.where(mask, loss_mat, 0.0).sum(dim=-1)
    per_row = count_sequences(mask, row_weights)
    match loss_agg_mode:
        case "token-mean":
            loss = sums.sum() / _denominator(batch_num_tokens, mask, dp_size)
        case "token-sum":
            loss = sums.sum()
        case "seq-mean-token-sum":
            loss = sums.sum() / _denominator(global_batch_size, per_row, dp_size)
        case "seq-mean-token-sum-norm":
            num_sequences = _denominator(global_batch_size, per_row, dp_size)
            if loss_scale_factor is None:
                raise ConfigError(
                    "seq-mean-token-sum-norm divides by the response budget, which was not given",
                    key="data.max_response_length",
                )
            loss = sums.sum() / num_sequences / loss_scale_factor
        case "seq-mean-token-mean":
            means = sums / mask.sum(dim=-1).clamp(min=1) * per_row.to(sums.dtype)
            loss = means.sum() / _denominator(global_batch_size, per_row, dp_size)
        case _:
            raise ConfigError(
                f"unknown loss_agg_mode {loss_agg_mode!r}",
                key="actor.loss_agg_mode",
                expected=f"one of {', '.join(get_args(LossAggMode))}",
            )
    return loss * dp_size


def compute_row_weights(mask: torch.Tensor, trajectory_ids: torch.Tensor) -> torch.Tensor:
    """Weigh rows so that the rows of one trajectory count together as one sequence.

    Args:
        mask: `[B, T]`, nonzero at trained tokens. It must contain all rows of each
            trajectory.
        trajectory_ids: `[B]`, integers; the same for rows of one trajectory.

    Returns:
        `[B]`, float64: trained tokens of the row / trained tokens of its trajectory; 0 for a row
        without a trained token.

    Example:
        >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
        >>> compute_row_weights(mask, torch.tensor([7, 7, 8])).tolist()
        [0.75, 0.25, 1.0]
    """
    tokens = mask.bool().sum(dim=-1)
    trajectory = trajectory_ids.unique(return_inverse=True)[1]
    totals = torch.zeros_like(tokens).index_add(0, trajectory, tokens)
    return tokens.double() / totals[trajectory].clamp(min=1)


def count_sequences(mask: torch.Tensor, row_weights: torch.Tensor | None) -> torch.Tensor:
    """Return each row's share of a sequence, `[B]`: 0 for a row without a trained token."""
    counted = mask.any(dim=-1)
    if row_weights is None:
        return counted
    return torch.where(counted, row_weights.to(counted.device), 0.0)


def _denominator(count: int | None, local: torch.Tensor, dp_size: int) -> int | torch.Tensor:
    if count is not None:
        return max(count, 1)
    if dp_size > 1:
        raise ConfigError(
            f"{dp_size} ranks need the counts of the whole mini-batch, and these were not given"
        )
    return local.sum().clamp(min=1)
