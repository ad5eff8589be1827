"""The loss of one packed micro-batch: policy gradient, entropy bonus, KL to the reference."""

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.losses.registry import effective_loss_agg_mode, get_policy_loss_fn
from agentrl.config.schema.training import ActorConfig
from agentrl.workers.batches import PolicyRows
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.packing import PackedBatch
from agentrl.workers.update import MicroLoss, find_broken, take_trained


def compute_micro_loss(
    scores: TokenScores,
    packed: PackedBatch,
    rows: PolicyRows,
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
        return MicroLoss.of_dummy(packed, scores.log_probs, scores.entropy)
    log_probs, entropy = packed.unpack(scores.log_probs), packed.unpack(scores.entropy)
    current, mode = log_probs.detach(), effective_loss_agg_mode(config)
    read = {
        "old_log_probs": rows.old_log_probs,
        "advantages": rows.advantages,
        "ref_log_prob": rows.ref_log_prob,
        "rollout_is_weights": rows.rollout_is_weights,
    }
    mask, given = take_trained(packed, rows.response_mask, read, log_probs.device)
    scale = scale.at(list(packed.row_index))
    loss, metrics = get_policy_loss_fn(config.policy_loss.loss_mode)(
        given.get("old_log_probs", current), log_probs, given["advantages"], mask, mode, config,
        given.get("rollout_is_weights"), scale=scale,
    )  # fmt: skip
    # Metrics are without the factor for FSDP2.
    parts = {**metrics, "actor/pg_loss": loss.detach() / scale.dp_size}
    parts["actor/entropy"] = scale.mean(entropy, mask)
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * scale.aggregate(entropy, mask, mode)
    if (ref_log_prob := given.get("ref_log_prob")) is not None:
        kl = scale.aggregate(kl_penalty(log_probs, ref_log_prob, config.kl_loss_type), mask, mode)
        parts["actor/kl_loss"] = kl.detach() / scale.dp_size
        loss = loss + config.kl_loss_coef * kl
    broken = find_broken({"log_probs": current, **given}, mask)
    return MicroLoss(loss, {**parts}, packed.row_index, current, broken)
