"""Which tokens are too far from what the engine would have sampled. Shapes: B, T, S spans."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.algorithms.correction.spans import Spans
from agentrl.algorithms.kl import MAX_LOG_RATIO
from agentrl.config.schema.correction import (
    Bounds,
    Estimate,
    Rejection,
    RolloutCorrectionConfig,
    parse_rejections,
)


class AppliedTest(NamedTuple):
    """What one test of rejection found."""

    rejection: Rejection
    spans: Spans
    values: Tensor
    """`[S]` float64: the statistic that is held against the bounds."""
    bounds: Bounds
    """Of the statistic; for k1 the logs of those that were given."""
    passed: Tensor
    """`[B, T]` bool."""


class Rejected(NamedTuple):
    """What all tests found together."""

    kept: Tensor
    """`[B, T]` bool: trained tokens that passed every test."""
    tests: tuple[AppliedTest, ...]


def reject_rollout(
    log_ratio: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    turn_ids: Tensor | None = None,
) -> Rejected:
    """Reject tokens, turns or sequences whose ratio to the engine strays beyond a threshold.

    ====================== ================================================================
    test                   rejects, with d = `rollout_log_probs - old_log_probs`
    ====================== ================================================================
    `token_<k>`            each token by its own estimate
    `turn_<s>_<k>`         turns, by sum, mean or max of their tokens' estimates
    `seq_<s>_<k>`          sequences, by the same of theirs
    ====================== ================================================================

    k1 = d, between the logs of two bounds; k2 = d^2 / 2 and k3 = exp(-d) + d - 1, up to one bound.
    (`seq_max_k1` has an upper bound alone: it rejects a sequence for one token that the trainer
    finds far less likely than the engine.) What is NaN is kept: the update reports it, and takes no
    step.

    Source: Liu et al. 2025, "When speed kills stability"; names are verl's, those of turns ours.

    Args:
        log_ratio: `[B, T]`, `old_log_probs - rollout_log_probs`.
        response_mask: `[B, T]`, nonzero where a token is trained.
        config: With `rollout_rs` and `rollout_rs_threshold`; a preset is read.
        turn_ids: `[B, T]`, for tests of turns.

    Raises:
        ConfigError: for a test or threshold that is none, and turns without `turn_ids`.
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
    # What is no number passes: rejected, a broken log-probability would never be reported.
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
