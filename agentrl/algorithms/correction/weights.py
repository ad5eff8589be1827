"""Importance weights between the policy that sampled and the one that is trained.

Shapes: B sequences, T response positions, S spans (tokens, turns or sequences).

The engine that samples and the trainer compute the same policy with other kernels, in other
precision, or with older weights: the batch is then not of the policy that is trained. A weight is
the ratio of the trainer's probability to the engine's, of a token, a turn or a whole sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.algorithms.correction.spans import Spans
from agentrl.algorithms.kl import MAX_LOG_RATIO
from agentrl.config.schema.correction import (
    Bounds,
    RolloutCorrectionConfig,
    parse_is_threshold,
)

_NO_WEIGHT = 1e-8
"""A mean of weights of at most this is none: nothing is divided by it."""


class RolloutWeights(NamedTuple):
    """Weights, and what they were made from."""

    weights: Tensor
    """`[B, T]` float32, 0 where masked."""
    raw: Tensor
    """`[S]` float64: ratios, neither bounded nor normalised."""
    applied: Tensor
    """`[S]` float64: bounded, not normalised."""
    spans: Spans
    bounds: Bounds
    factor: float
    """What the weights were divided by; 1 without normalisation."""


def weigh_rollout(
    log_ratio: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    turn_ids: Tensor | None = None,
) -> RolloutWeights:
    """Weigh tokens by how much likelier the trainer finds them than the engine that sampled them.

    The ratio of a turn or a sequence is the product of its tokens' ratios. With one bound, ratios
    above it become the bound (`truncate`) or 0 (`mask`); with two, those outside become 0. With
    `rollout_is_batch_normalize` the weights are divided by their mean over tokens, turns or
    sequences, unless no weight survives.

    Source: Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training", by token; Liu et al. 2025, "When speed
    kills stability", by sequence and masked; IcePop, two-sided: Ring team 2025 (arXiv 2510.18855).
    Names and thresholds are verl's.

    Args:
        log_ratio: `[B, T]`, `old_log_probs - rollout_log_probs`.
        response_mask: `[B, T]`, nonzero where a token is trained.
        config: With `rollout_is`; a preset is read.
        turn_ids: `[B, T]`, for `rollout_is: turn`.

    Raises:
        ConfigError: for a threshold that is none, and turns without `turn_ids`.
    """
    own = config.effective
    bounds = parse_is_threshold(own.rollout_is_threshold)
    spans = Spans.of(own.rollout_is or "token", response_mask, turn_ids)
    raw = spans.sum(log_ratio.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    applied = _bounded(raw, bounds, is_masked=own.rollout_is_mode == "mask")
    factor = _mean_weight(applied, spans) if own.rollout_is_batch_normalize else 1.0
    weights = spans.on_tokens(applied / factor).float()
    return RolloutWeights(weights, raw, applied, spans, bounds, factor)


def _bounded(raw: Tensor, bounds: Bounds, *, is_masked: bool) -> Tensor:
    """Bound ratios; NaN, which is beyond no bound, stays and is reported by the update."""
    if bounds.lower is not None:
        return torch.where((raw < bounds.lower) | (raw > bounds.upper), 0.0, raw)
    if is_masked:
        return torch.where(raw > bounds.upper, 0.0, raw)
    return raw.clamp(max=bounds.upper)


def _mean_weight(applied: Tensor, spans: Spans) -> float:
    there = spans.is_there()
    mean = float(torch.where(there, applied, 0.0).sum() / there.sum().clamp(min=1))
    return mean if mean > _NO_WEIGHT else 1.0
