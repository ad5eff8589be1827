"""How well a step uses its time: tokens per second, model FLOP utilization, padding, idle time.

perf/tokens_per_s/<phase>     tokens of all ranks per second of the slowest one
perf/mfu/actor                model FLOP utilization of the update
perf/mfu/actor_infer          of the log-probabilities before the update
perf/padding_frac             share of the batch's tensors that is padding
perf/idle/engine_slots_frac   share of the rollout's slots, over its time, without an engine call
perf/idle/tail_frac           share of the rollout's time with less than half of the slots in use
perf/idle/ranks_frac          share of the rollout's time that a rank waits for the slowest one
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from agentrl.engines.attention_shape import AttentionShape
from agentrl.engines.model_config import read_per_layer
from agentrl.protocol import DataProto
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.metrics.aggregators import (
    MeanMetric,
    MetricDict,
    RateMetric,
    WaitMetric,
)
from agentrl.workers.batches import read_padded_rows
from agentrl.workers.model import PolicyModel
from agentrl.workers.packing import count_tokens
from agentrl.workers.vision_tower import tower_weights

PEAK_TFLOPS: Mapping[str, float] = {
    "GB200": 2500, "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "H800": 989, "H20": 148, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121,
    "RTX 4090": 165, "MI300X": 1307,
}  # fmt: skip
"""Peak of dense bfloat16 matrix products, in units of 10^12 per second, by a word of the device's
name; of several that fit, the first. Source: the vendors' data sheets."""


def peak_tflops(device: str) -> float | None:
    """Find the peak of a device by its name; None if it is not in the table.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3")
        989
    """
    for name, peak in PEAK_TFLOPS.items():
        if re.search(rf"\b{name}\b", device):
            return peak
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What the floating-point operations of a model's passes depend on.

    A forward pass over a row of s tokens takes

        2 * N * s  +  4 * L * Q * s^2

    operations: N weights are multiplied with each token, and L layers with queries of Q numbers
    (heads times their size) compute scores and weighted values of s^2 pairs of tokens. A backward
    pass takes twice as much; so training takes

        6 * N * s  +  12 * L * Q * s^2.

    Of weights that are not trained (with LoRA, the base) the backward pass computes no gradient:
    4 instead of 6. N counts the head, and the embedding only if it is the head; of experts those
    that compute a token; and not a vision tower. As in the source, the mask of causal attention
    does not halve the second term, and what is computed again (checkpointing) does not count.

    Source: PaLM (Chowdhery et al. 2022), appendix B.
    """

    num_weights: float
    """N."""
    trained_weights: float
    """Those of N that are trained."""
    num_layers: int
    query_width: float
    """Of a layer, on average."""

    @classmethod
    def of(cls, policy: PolicyModel) -> Self:
        """Count the weights of a model; sharded ones count as a whole."""
        lm: Any = policy.lm
        config, shapes = policy.text_config, AttentionShape.of_layers(policy.text_config)
        embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
        is_tied = head is not None and head.weight is embedding.weight
        left_out = set(map(id, tower_weights(lm)))
        if not is_tied:
            left_out |= {id(one) for one in embedding.parameters()}
        active = _active_share(config)
        total = trained = 0.0
        for name, weight in lm.named_parameters():
            if id(weight) in left_out:
                continue
            count = weight.numel() * (active if "experts" in name.split(".") else 1.0)
            total += count
            trained += count if weight.requires_grad else 0.0
        return cls(
            num_weights=total,
            trained_weights=trained,
            num_layers=len(shapes),
            query_width=sum(shape.query_width for shape in shapes) / len(shapes),
        )

    def forward_flops(self, lengths: Sequence[int]) -> float:
        """Count the operations of a forward pass over rows of these lengths."""
        return 2 * self.num_weights * sum(lengths) + 4 * self._pairs(lengths)

    def train_flops(self, lengths: Sequence[int]) -> float:
        """Count the operations of a forward and a backward pass over rows of these lengths."""
        per_token = 4 * self.num_weights + 2 * self.trained_weights
        return per_token * sum(lengths) + 12 * self._pairs(lengths)

    def _pairs(self, lengths: Sequence[int]) -> float:
        return self.num_layers * self.query_width * sum(length**2 for length in lengths)


def _active_share(config: Any) -> float:
    """Return the share of the experts that compute a token; 1 for a model without experts."""
    chosen = max(read_per_layer(config, "num_experts_per_tok", 0))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((n for name in names if (n := max(read_per_layer(config, name, 0)))), None)
    return chosen / total if chosen and total else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Measures one rank's part of a step.

    Args:
        cost: Of the policy.
        num_ranks: Ranks that train.
        peak_flops: Peak of one rank's device, per second; None: unknown, and there is no MFU.
    """

    cost: ModelCost
    num_ranks: int
    peak_flops: float | None

    @classmethod
    def of(cls, policy: PolicyModel, given_tflops: float | None) -> Self:
        """Read the device's peak from its name, unless it is given."""
        world = policy.world
        if given_tflops is None and world.device.type == "cuda":
            given_tflops = peak_tflops(torch.cuda.get_device_name(world.device))
        peak = None if given_tflops is None else given_tflops * 1e12
        return cls(cost=ModelCost.of(policy), num_ranks=world.size, peak_flops=peak)

    def metrics(
        self,
        requests: Sequence[AsyncRolloutRequest],
        batch: DataProto,
        seconds: Mapping[str, float],
        updated: Mapping[str, Sequence[int]],
    ) -> MetricDict:
        """Measure a step.

        Args:
            requests: Everything that was rolled out.
            batch: The rows made from the requests.
            seconds: Seconds of the stages (`Timer.pop_metrics`).
            updated: By update (`update_actor`, `update_critic`): the length of each row of this
                rank that it computed, over the epochs.
        """
        turns = [turn for r in requests for one in r.sequences for turn in one.turns]
        sampled = sum(turn.num_tokens for turn in turns if turn.role == "assistant")
        scored = count_tokens(read_padded_rows(batch)) if len(batch) else []
        passes = dict.fromkeys(("old_log_prob", "ref", "values"), sum(scored))
        phases = {"gen": sampled, **passes, **{name: sum(rows) for name, rows in updated.items()}}
        metrics: MetricDict = {
            f"perf/tokens_per_s/{phase}": RateMetric(float(number), seconds[f"timing_s/{phase}"])
            for phase, number in phases.items()
            if seconds.get(f"timing_s/{phase}")
        }
        for name, phase, flops in (
            ("actor", "update_actor", self.cost.train_flops(updated["update_actor"])),
            ("actor_infer", "old_log_prob", self.cost.forward_flops(scored)),
        ):
            if self.peak_flops and seconds.get(f"timing_s/{phase}"):
                share = flops / self.peak_flops / self.num_ranks
                metrics[f"perf/mfu/{name}"] = RateMetric(share, seconds[f"timing_s/{phase}"])
        if batch.batch is not None and len(batch):
            mask: Any = batch.batch["attention_mask"]
            num_padding = mask.numel() - mask.sum().item()
            metrics["perf/padding_frac"] = MeanMetric(num_padding, mask.numel())
        metrics |= idle_metrics(requests, seconds.get("timing_s/gen", 0.0))
        if self.num_ranks > 1 and seconds.get("timing_s/gen"):
            gen_s = seconds["timing_s/gen"]
            metrics["perf/idle/ranks_frac"] = WaitMetric(gen_s, 1, gen_s)
        return metrics


def idle_metrics(requests: Sequence[AsyncRolloutRequest], seconds: float) -> MetricDict:
    """Measure how much of a rollout's slots is not in use.

    A rollout has as many slots as requests ran at once, at most.

    Args:
        requests: What was rolled out; those without a recorded start are left out.
        seconds: Seconds of the rollout.
    """
    spans = [
        (started, started + r.metrics.get("seconds", 0.0))
        for r in requests
        if (started := r.metrics.get("seconds_started")) is not None
    ]
    if not spans or not seconds:
        return {}
    in_engine = sum(
        turn.seconds
        for r in requests
        for one in r.sequences
        for turn in one.turns
        if turn.role == "assistant"
    )
    # Ends come before starts at the same time.
    changes = sorted([(at, +1) for at, _ in spans] + [(at, -1) for _, at in spans])
    used, running, before = list[tuple[int, float]](), 0, changes[0][0]
    for at, change in changes:
        used.append((running, at - before))
        running, before = running + change, at
    slots = max(number for number, _ in used)
    tail = sum(length for number, length in used if 2 * number < slots)
    return {
        "perf/idle/engine_slots_frac": MeanMetric(
            max(0.0, slots * seconds - in_engine), slots * seconds
        ),
        "perf/idle/tail_frac": MeanMetric(min(tail, seconds), seconds),
    }
