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
    """What one micro-batch contributes to its mini-batch."""

    loss: Tensor
    """Scalar with gradient; includes the factor for FSDP2's averaging over ranks."""
    parts: dict[str, Tensor | float]
    """Parts of the mini-batch's metrics; they add up over micro-batches and ranks."""
    broken_rows: dict[int, NotFinite]
    """Rows of the batch of which a number that the loss reads is not finite."""


def compute_micro_loss(
    scores: TokenScores,
    packed: PackedBatch,
    rows: UpdateRows,
    scale: LossScale,
    config: ActorConfig,
) -> MicroLoss:
    """Compute a micro-batch's share of the mini-batch's loss.

    Args:
        scores: Of the packed targets, `[N]`, with gradient.
        packed: Where they belong.
        rows: The whole batch.
        scale: The mini-batch's denominators; weights of rows, if any, are of the whole batch's.
        config: Loss, coefficients, aggregation.
    """
    if not packed.row_index:
        # Zero times what the model gave: the backward pass runs through every shard.
        return MicroLoss((scores.log_probs.sum() + scores.entropy.sum()) * 0.0, {}, {})
    log_probs, entropy = packed.unpack(scores.log_probs), packed.unpack(scores.entropy)
    micro = _pick(rows, packed, log_probs)
    mask, mode = micro.mask, effective_loss_agg_mode(config)
    scale = scale.at(list(packed.row_index))
    loss, metrics = get_policy_loss_fn(config.policy_loss.loss_mode)(
        micro.old_log_probs, log_probs, micro.advantages, mask, mode, config,
        micro.rollout_is_weights, scale=scale,
    )  # fmt: skip
    parts = {**metrics, "actor/pg_loss": _share(loss, scale)}
    parts["actor/entropy"] = scale.mean(entropy, mask)
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * scale.aggregate(entropy, mask, mode)
    if micro.ref_log_prob is not None:
        kl = scale.aggregate(
            kl_penalty(log_probs, micro.ref_log_prob, config.kl_loss_type), mask, mode
        )
        parts["actor/kl_loss"] = _share(kl, scale)
        loss = loss + config.kl_loss_coef * kl
    return MicroLoss(loss, {**parts}, _broken_rows(packed, log_probs, micro))


@dataclass(frozen=True, slots=True)
class _MicroRows:
    """The rows of one micro-batch on its device, `[b, T]` each; 0 where masked."""

    mask: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    ref_log_prob: Tensor | None
    rollout_is_weights: Tensor | None


def _pick(rows: UpdateRows, packed: PackedBatch, like: Tensor) -> _MicroRows:
    index = torch.tensor(packed.row_index)

    def take(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)].to(like.device)

    mask = take(rows.response_mask).ne(0)

    def take_trained(tensor: Tensor) -> Tensor:
        # Here once, so that "observations are invisible" holds in losses that never think of it.
        return torch.where(mask, take(tensor), 0.0)

    ref, weights = rows.ref_log_prob, rows.rollout_is_weights
    return _MicroRows(
        mask=mask,
        old_log_probs=take_trained(rows.old_log_probs),
        advantages=take_trained(rows.advantages),
        ref_log_prob=None if ref is None else take_trained(ref),
        rollout_is_weights=None if weights is None else take_trained(weights),
    )


def _share(loss: Tensor, scale: LossScale) -> Tensor:
    """A loss as a metric: without the factor for FSDP2."""
    return loss.detach() / scale.dp_size


def _broken_rows(packed: PackedBatch, log_probs: Tensor, micro: _MicroRows) -> dict[int, NotFinite]:
    looked_at = {
        "log_probs": log_probs.detach(),
        "old_log_probs": micro.old_log_probs,
        "advantages": micro.advantages,
        "ref_log_prob": micro.ref_log_prob,
        "rollout_is_weights": micro.rollout_is_weights,
    }
    broken = {
        name: ~tensor.isfinite() & micro.mask
        for name, tensor in looked_at.items()
        if tensor is not None
    }
    if not bool(torch.stack(list(broken.values())).any()):
        return {}
    found: dict[int, NotFinite] = {}
    for name, places in broken.items():
        for place in places.any(dim=1).nonzero().flatten().tolist():
            tokens = tuple(places[place].nonzero().flatten().tolist())
            found.setdefault(packed.row_index[place], {})[name] = tokens
    return found
