"""The loss of one packed micro-batch: policy gradient, entropy bonus, KL to the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.losses.registry import effective_loss_agg_mode, get_policy_loss_fn
from agentrl.config.schema.training import ActorConfig
from agentrl.workers.batches import UpdateRows
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.packing import PackedBatch

NotFinite = dict[str, tuple[int, ...]]
"""By quantity: the response tokens at which it is not finite."""


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """One micro-batch's part of its mini-batch."""

    loss: Tensor
    """Scalar with gradient, multiplied by the number of ranks because FSDP2 averages over them."""
    parts: dict[str, Tensor | float]
    """Parts of the mini-batch's metrics; they add up over micro-batches and ranks."""
    broken_rows: dict[int, NotFinite]
    """Rows of the batch with a value that the loss reads and that is not finite."""


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
        return MicroLoss((scores.log_probs.sum() + scores.entropy.sum()) * 0.0, {}, {})
    log_probs, entropy = packed.unpack(scores.log_probs), packed.unpack(scores.entropy)
    micro = _take_rows(rows, packed, log_probs)
    mask, mode = micro.mask, effective_loss_agg_mode(config)
    scale = scale.at(list(packed.row_index))
    loss, metrics = get_policy_loss_fn(config.policy_loss.loss_mode)(
        micro.old_log_probs, log_probs, micro.advantages, mask, mode, config,
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
    return MicroLoss(loss, {**parts}, _broken_rows(packed, log_probs, micro))


@dataclass(frozen=True, slots=True)
class _MicroRows:
    """The rows of one micro-batch on its device, `[b, T]` each; 0 at masked positions."""

    mask: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    ref_log_prob: Tensor | None
    rollout_is_weights: Tensor | None


def _take_rows(rows: UpdateRows, packed: PackedBatch, like: Tensor) -> _MicroRows:
    index = torch.tensor(packed.row_index)

    def take(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)].to(like.device)

    mask = take(rows.response_mask).ne(0)

    def take_trained(tensor: Tensor) -> Tensor:
        # Masked here once, so that observations are invisible in every loss.
        return torch.where(mask, take(tensor), 0.0)

    ref, weights = rows.ref_log_prob, rows.rollout_is_weights
    return _MicroRows(
        mask=mask,
        old_log_probs=take_trained(rows.old_log_probs),
        advantages=take_trained(rows.advantages),
        ref_log_prob=None if ref is None else take_trained(ref),
        rollout_is_weights=None if weights is None else take_trained(weights),
    )


def _broken_rows(packed: PackedBatch, log_probs: Tensor, micro: _MicroRows) -> dict[int, NotFinite]:
    checked = {
        "log_probs": log_probs.detach(),
        "old_log_probs": micro.old_log_probs,
        "advantages": micro.advantages,
        "ref_log_prob": micro.ref_log_prob,
        "rollout_is_weights": micro.rollout_is_weights,
    }
    broken = {
        name: ~tensor.isfinite() & micro.mask
        for name, tensor in checked.items()
        if tensor is not None
    }
    if not bool(torch.stack(list(broken.values())).any()):
        return {}
    found: dict[int, NotFinite] = {}
    for name, positions in broken.items():
        for row in positions.any(dim=1).nonzero().flatten().tolist():
            tokens = tuple(positions[row].nonzero().flatten().tolist())
            found.setdefault(packed.row_index[row], {})[name] = tokens
    return found
