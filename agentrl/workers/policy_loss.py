"""The loss of one packed micro-batch: policy gradient, entropy bonus, KL to the reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.losses.registry import effective_loss_agg_mode, get_policy_loss_fn
from agentrl.config.schema.training import ActorConfig
from agentrl.workers.batches import UpdateRows
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.packing import PackedBatch, move_to_device

NotFinite = dict[str, tuple[int, ...]]
"""By quantity: the response tokens at which it is not finite."""


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """One micro-batch's part of its mini-batch."""

    loss: Tensor
    """Scalar with gradient, multiplied by the number of ranks because FSDP2 averages over them."""
    parts: dict[str, Tensor | float]
    """Parts of the mini-batch's metrics; they add up over micro-batches and ranks."""
    row_index: tuple[int, ...]
    """The rows of the batch."""
    log_probs: Tensor
    """`[b, T]`, detached; 0 at masked positions."""
    broken: dict[str, Tensor]
    """`[b, T]` bool by quantity: trained tokens at which it is not finite."""


def compute_micro_loss(
    scores: TokenScores,
    packed: PackedBatch,
    rows: UpdateRows,
    scale: LossScale,
    config: ActorConfig,
) -> MicroLoss:
    """Compute a micro-batch's share of the mini-batch's loss.

    Args:
        scores: Scores of the packed targets, `[N]`, with gradient.
        packed: The micro-batch.
        rows: The whole batch.
        scale: The mini-batch's denominators; its row weights, if any, are those of all rows.
        config: Loss, coefficients, aggregation.
    """
    if not packed.row_index:
        # Zero times the scores: the backward pass must run through every shard.
        nothing = scores.log_probs.detach().new_zeros(0, packed.response_length)
        return MicroLoss((scores.log_probs.sum() + scores.entropy.sum()) * 0.0, {}, (), nothing, {})
    log_probs, entropy = packed.unpack(scores.log_probs), packed.unpack(scores.entropy)
    micro = _take_rows(rows, packed, log_probs)
    current = log_probs.detach()
    mask, mode = micro.mask, effective_loss_agg_mode(config)
    scale = scale.at(list(packed.row_index))
    old_log_probs = current if micro.old_log_probs is None else micro.old_log_probs
    loss, metrics = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_probs, log_probs, micro.advantages, mask, mode, config,
        micro.rollout_is_weights, scale=scale,
    )  # fmt: skip
    # Metrics are without the factor for FSDP2.
    parts = {**metrics, "actor/pg_loss": loss.detach() / scale.dp_size}
    parts["actor/entropy"] = scale.mean(entropy, mask)
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * scale.aggregate(entropy, mask, mode)
    if micro.ref_log_prob is not None:
        kl = scale.aggregate(
            kl_penalty(log_probs, micro.ref_log_prob, config.kl_loss_type), mask, mode
        )
        parts["actor/kl_loss"] = kl.detach() / scale.dp_size
        loss = loss + config.kl_loss_coef * kl
    return MicroLoss(loss, {**parts}, packed.row_index, current, _find_broken(current, micro))


@dataclass(frozen=True, slots=True)
class _MicroRows:
    """The rows of one micro-batch on its device, `[b, T]` each; 0 at masked positions."""

    mask: Tensor
    old_log_probs: Tensor | None
    advantages: Tensor
    ref_log_prob: Tensor | None
    rollout_is_weights: Tensor | None


def _take_rows(rows: UpdateRows, packed: PackedBatch, like: Tensor) -> _MicroRows:
    index = torch.tensor(packed.row_index)

    def take(tensor: Tensor) -> Tensor:
        return move_to_device(tensor[index], like.device)

    mask = take(rows.response_mask).ne(0)

    def take_trained(tensor: Tensor) -> Tensor:
        # Masked here once, so that observations are invisible in every loss.
        return torch.where(mask, take(tensor), 0.0)

    old, ref, weights = rows.old_log_probs, rows.ref_log_prob, rows.rollout_is_weights
    return _MicroRows(
        mask=mask,
        old_log_probs=None if old is None else take_trained(old),
        advantages=take_trained(rows.advantages),
        ref_log_prob=None if ref is None else take_trained(ref),
        rollout_is_weights=None if weights is None else take_trained(weights),
    )


def _find_broken(log_probs: Tensor, micro: _MicroRows) -> dict[str, Tensor]:
    checked = {
        "log_probs": log_probs,
        "old_log_probs": micro.old_log_probs,
        "advantages": micro.advantages,
        "ref_log_prob": micro.ref_log_prob,
        "rollout_is_weights": micro.rollout_is_weights,
    }
    return {
        name: ~tensor.isfinite() & micro.mask
        for name, tensor in checked.items()
        if tensor is not None
    }


def name_broken_rows(micros: Sequence[MicroLoss]) -> dict[int, NotFinite]:
    """Name the rows with a value that the loss reads and that is not finite.

    Called once for all micro-batches, because it waits for the device.
    """
    found: dict[int, NotFinite] = {}
    for micro in micros:
        for name, positions in micro.broken.items():
            for row in positions.any(dim=1).nonzero().flatten().tolist():
                tokens = tuple(positions[row].nonzero().flatten().tolist())
                found.setdefault(micro.row_index[row], {})[name] = tokens
    return found
