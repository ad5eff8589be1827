"""From a loss per token to one number, the same however the mini-batch is laid out.

Shapes: B sequences, T response positions.

The denominators of a loss are those of the whole mini-batch, over its micro-batches and over all
ranks. Then the losses of the micro-batches *add up* to the mini-batch's (law 10), and their
gradients do so too. Sequences in which nothing is trained count nowhere.

============================ ==========================================================
mode                         the loss of a mini-batch of S sequences, N trained tokens
============================ ==========================================================
`token-mean`                 sum over all tokens / N
`token-sum`                  sum over all tokens
`seq-mean-token-sum`         sum over all tokens / S
`seq-mean-token-sum-norm`    sum over all tokens / S / the response budget
`seq-mean-token-mean`        sum over sequences of each one's token mean / S
============================ ==========================================================
"""

from dataclasses import dataclass
from typing import get_args

import torch

from agentrl.config.schema import LossAggMode
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """What one mini-batch is divided by, in all its micro-batches, on all ranks.

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
    """Sequences of the mini-batch with at least one trained token, over all ranks."""
    dp_size: int = 1
    """Ranks. FSDP2 averages gradients over them, so each rank's loss is multiplied by it."""
    loss_scale_factor: float | None = None
    """The configured response budget in tokens, for `seq-mean-token-sum-norm`."""

    @classmethod
    def of(
        cls, mask: torch.Tensor, *, dp_size: int = 1, loss_scale_factor: float | None = None
    ) -> "LossScale":
        """Count the whole mini-batch's mask `[B, T]`."""
        return cls(
            batch_num_tokens=int(mask.bool().sum()),
            global_batch_size=int(mask.bool().any(dim=-1).sum()),
            dp_size=dp_size,
            loss_scale_factor=loss_scale_factor,
        )

    def aggregate(
        self, loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str
    ) -> torch.Tensor:
        """One micro-batch's part of the mini-batch's loss (see `agg_loss`)."""
        return agg_loss(
            loss_mat,
            loss_mask,
            loss_agg_mode,
            dp_size=self.dp_size,
            batch_num_tokens=self.batch_num_tokens,
            global_batch_size=self.global_batch_size,
            loss_scale_factor=self.loss_scale_factor,
        )

    def mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """One micro-batch's part of a mean over the mini-batch's tokens, detached.

        The parts of all micro-batches and ranks add up to the mean: so metrics are summed.
        """
        return masked_sum(values.detach(), mask) / max(self.batch_num_tokens, 1)


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """Aggregate a loss per token. What stands on masked positions, NaN included, has no effect.

    A batch in which nothing is trained has the loss 0 and the gradient 0.

    Seven parameters, because this is the reference's signature; `LossScale.aggregate` takes three.
    Without counts, `loss_mat` is the whole mini-batch.

    Args:
        loss_mat: `[B, T]`.
        loss_mask: `[B, T]`, nonzero where a token is trained.
        loss_agg_mode: One of the modes of this module's table.
        dp_size: Ranks.
        batch_num_tokens: Trained tokens of the mini-batch, over all ranks.
        global_batch_size: Sequences of it in which something is trained, over all ranks.
        loss_scale_factor: The response budget in tokens, for the `norm` mode.

    Raises:
        ConfigError: for an unknown mode, for several ranks without the count that the mode needs,
            and for the `norm` mode without the response budget (the padded length, which the
            reference falls back on, changes from batch to batch).
    """
    mask = loss_mask.bool()
    sums = torch.where(mask, loss_mat, 0.0).sum(dim=-1)
    match loss_agg_mode:
        case "token-mean":
            loss = sums.sum() / _denominator(batch_num_tokens, mask, dp_size)
        case "token-sum":
            loss = sums.sum()
        case "seq-mean-token-sum":
            loss = sums.sum() / _denominator(global_batch_size, mask.any(dim=-1), dp_size)
        case "seq-mean-token-sum-norm":
            num_sequences = _denominator(global_batch_size, mask.any(dim=-1), dp_size)
            loss = sums.sum() / num_sequences / _budget(loss_scale_factor)
        case "seq-mean-token-mean":
            means = sums / mask.sum(dim=-1).clamp(min=1)
            loss = means.sum() / _denominator(global_batch_size, mask.any(dim=-1), dp_size)
        case _:
            raise ConfigError(
                f"unknown loss_agg_mode {loss_agg_mode!r}",
                key="actor.loss_agg_mode",
                expected=f"one of {', '.join(get_args(LossAggMode))}",
            )
    return loss * dp_size


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum the values at unmasked positions; what stands elsewhere, NaN included, has no effect."""
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average the values at unmasked positions; 0 where there are none."""
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)


def _denominator(count: int | None, local: torch.Tensor, dp_size: int) -> int | torch.Tensor:
    if count is not None:
        return max(count, 1)
    if dp_size > 1:
        raise ConfigError(f"{dp_size} ranks need the counts of the whole mini-batch")
    return local.sum().clamp(min=1)


def _budget(loss_scale_factor: float | None) -> float:
    if loss_scale_factor is None:
        raise ConfigError(
            "seq-mean-token-sum-norm divides by the response budget, which was not given",
            key="data.max_response_length",
        )
    return loss_scale_factor
