"""Importance weights and rejection of what the engine sampled.

The engine and the trainer compute the same policy with other kernels, in other precision, or with
older weights. Then the batch is not a sample of the policy in training. A weight is the ratio of
the trainer's probability to the engine's, of a token, a turn or a whole sequence.

Shapes: B sequences, T response positions, S spans (tokens, turns or sequences).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.algorithms.kl import MAX_LOG_RATIO
from agentrl.config.schema.correction import (
    Bounds,
    Estimate,
    Level,
    Rejection,
    RolloutCorrectionConfig,
    Statistic,
    parse_is_threshold,
    parse_rejections,
)
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Spans:
    """The span (token, turn or sequence) of each token. Masked tokens have none."""

    level: Level
    mask: Tensor
    """`[B, T]` bool."""
    of_token: Tensor | None
    """`[B, T]` int64: the number of each token's turn; None if a span is a token or a row."""
    num: int
    """S; some may have no token."""

    @classmethod
    def of(cls, level: Level, mask: Tensor, turn_ids: Tensor | None = None) -> "Spans":
        """Number the spans.

        Args:
            level: The kind of span.
            mask: `[B, T]`, nonzero at trained tokens.
            turn_ids: `[B, T]`, the turn of each token in its sequence, for `turn`.

        Raises:
            ConfigError: for turns without `turn_ids`.
        """
        inside = mask.bool()
        if level != "turn":
            return cls(level, inside, None, len(mask) if level == "sequence" else mask.numel())
        if turn_ids is None:
            raise ConfigError("correction by turn needs turn_ids, and the batch has none")
        turns = torch.where(inside, turn_ids, 0)
        width = int(turns.max()) + 1 if turns.numel() else 1
        row = torch.arange(len(mask), device=mask.device)[:, None]
        return cls(level, inside, row * width + turns, len(mask) * width)

    def count(self) -> Tensor:
        """Return `[S]` float64: the number of tokens of each span."""
        return self.sum(self.mask)

    def has_tokens(self) -> Tensor:
        """Return `[S]` bool: whether a span has a token."""
        return self.count() > 0

    def sum(self, values: Tensor) -> Tensor:
        """Return `[S]` float64: the sum of `values` `[B, T]` over each span."""
        exact = torch.where(self.mask, values, 0).double()
        if self.of_token is not None:
            zeros = exact.new_zeros(self.num)
            return zeros.index_add(0, self.of_token.reshape(-1), exact.reshape(-1))
        return exact.sum(dim=-1) if self.level == "sequence" else exact.reshape(-1)

    def mean(self, values: Tensor) -> Tensor:
        """Return `[S]` float64: the mean of `values` over each span; 0 for an empty span."""
        return self.sum(values) / self.count().clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """Return `[S]` float64: the largest of `values` in each span; 0 for an empty span."""
        exact = torch.where(self.mask, values.double(), -torch.inf)
        if self.of_token is not None:
            lowest = exact.new_full((self.num,), -torch.inf)
            index, flat = self.of_token.reshape(-1), exact.reshape(-1)
            found = lowest.scatter_reduce(0, index, flat, reduce="amax")
        else:
            found = exact.amax(dim=-1) if self.level == "sequence" else exact.reshape(-1)
        return torch.where(found == -torch.inf, 0.0, found)

    def reduce(self, values: Tensor, statistic: Statistic) -> Tensor:
        """Return `[S]` float64: a statistic of `values` over each span."""
        match statistic:
            case "mean":
                return self.mean(values)
            case "max":
                return self.max(values)
            case "sum" | "each":
                return self.sum(values)

    def on_tokens(self, values: Tensor) -> Tensor:
        """Return `[B, T]`: the value `[S]` of each token's span; 0 at masked positions."""
        if self.of_token is not None:
            spread = values[self.of_token]
        else:
            spread = values[:, None] if self.level == "sequence" else values.view(self.mask.shape)
        return torch.where(self.mask, spread, torch.zeros_like(spread))


_NO_WEIGHT = 1e-8
"""Weights are not divided by a mean of at most this."""


class RolloutWeights(NamedTuple):
    """Weights and their intermediate values."""

    weights: Tensor
    """`[B, T]` float32, 0 at masked positions."""
    raw: Tensor
    """`[S]` float64: ratios, not bounded and not normalized."""
    applied: Tensor
    """`[S]` float64: bounded, not normalized."""
    spans: Spans
    bounds: Bounds
    factor: float
    """The divisor of the weights; 1 without normalization."""


def weigh_rollout(
    log_ratio: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    turn_ids: Tensor | None = None,
) -> RolloutWeights:
    """Weight tokens by the ratio of their probability in the trainer to that in the engine.

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
        response_mask: `[B, T]`, nonzero at trained tokens.
        config: Its `rollout_is` settings; a preset is applied.
        turn_ids: `[B, T]`, for `rollout_is: turn`.

    Raises:
        ConfigError: for an invalid threshold, and for turns without `turn_ids`.
    """
    own = config.effective
    bounds = parse_is_threshold(own.rollout_is_threshold)
    spans = Spans.of(own.rollout_is or "token", response_mask, turn_ids)
    raw = spans.sum(log_ratio.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    applied = _bounded(raw, bounds, is_masked=own.rollout_is_mode == "mask")
    factor = 1.0
    if own.rollout_is_batch_normalize:
        there = spans.has_tokens()
        mean = float(torch.where(there, applied, 0.0).sum() / there.sum().clamp(min=1))
        factor = mean if mean > _NO_WEIGHT else 1.0
    weights = spans.on_tokens(applied / factor).float()
    return RolloutWeights(weights, raw, applied, spans, bounds, factor)


def _bounded(raw: Tensor, bounds: Bounds, *, is_masked: bool) -> Tensor:
    """Bound ratios. NaN is outside no bound: it stays, and the update reports it."""
    if bounds.lower is not None:
        return torch.where((raw < bounds.lower) | (raw > bounds.upper), 0.0, raw)
    if is_masked:
        return torch.where(raw > bounds.upper, 0.0, raw)
    return raw.clamp(max=bounds.upper)


class AppliedTest(NamedTuple):
    """The result of one test of rejection."""

    rejection: Rejection
    spans: Spans
    values: Tensor
    """`[S]` float64: the statistic that is compared with the bounds."""
    bounds: Bounds
    """Bounds of the statistic; for k1 the logs of the configured bounds."""
    passed: Tensor
    """`[B, T]` bool."""


class Rejected(NamedTuple):
    """The result of all tests together."""

    kept: Tensor
    """`[B, T]` bool: trained tokens that passed every test."""
    tests: tuple[AppliedTest, ...]


def reject_rollout(
    log_ratio: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    turn_ids: Tensor | None = None,
) -> Rejected:
    """Reject tokens, turns or sequences whose ratio to the engine is outside a threshold.

    ====================== ================================================================
    test                   rejects, with d = `rollout_log_probs - old_log_probs`
    ====================== ================================================================
    `token_<k>`            each token by its own estimate
    `turn_<s>_<k>`         turns, by sum, mean or max of their tokens' estimates
    `seq_<s>_<k>`          sequences, by sum, mean or max of their tokens' estimates
    ====================== ================================================================

    k1 = d, between the logs of two bounds; k2 = d^2 / 2 and k3 = exp(-d) + d - 1, up to one bound.
    (`seq_max_k1` has an upper bound only: it rejects a sequence for one token that is far less
    likely in the trainer than in the engine.) NaN is kept: the update reports it and skips a step.

    Source: Liu et al. 2025, "When speed kills stability"; names are verl's.

    Args:
        log_ratio: `[B, T]`, `old_log_probs - rollout_log_probs`.
        response_mask: `[B, T]`, nonzero at trained tokens.
        config: Its `rollout_rs` and `rollout_rs_threshold`; a preset is applied.
        turn_ids: `[B, T]`, for tests of turns.

    Raises:
        ConfigError: for an invalid test or threshold, and for turns without `turn_ids`.
    """
    own = config.effective
    mask = response_mask.bool()
    distance = -torch.where(mask, log_ratio.detach(), 0.0).double()
    distance = distance.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rejections = parse_rejections(own.rollout_rs or "", own.rollout_rs_threshold)
    tests = tuple(_test(rejection, distance, mask, turn_ids) for rejection in rejections)
    kept = mask
    for test in tests:
        kept = kept & test.passed
    return Rejected(kept, tests)


def _test(
    rejection: Rejection, distance: Tensor, mask: Tensor, turn_ids: Tensor | None
) -> AppliedTest:
    spans = Spans.of(rejection.level, mask, turn_ids)
    values = spans.reduce(_estimates(distance, rejection.estimate), rejection.statistic)
    bounds = rejection.bounds
    if rejection.estimate == "k1":
        lower = None if bounds.lower is None else math.log(bounds.lower)
        bounds = Bounds(lower, math.log(bounds.upper))
    # NaN passes: if it were rejected, a wrong log-probability would not be reported.
    fails = values > bounds.upper
    if bounds.lower is not None:
        fails = fails | (values < bounds.lower)
    return AppliedTest(rejection, spans, values, bounds, spans.on_tokens(~fails))


def _estimates(distance: Tensor, estimate: Estimate) -> Tensor:
    match estimate:
        case "k1":
            return distance
        case "k2":
            return 0.5 * distance.square()
        case "k3":
            return torch.exp(-distance) + distance - 1
