"""Metrics of the distance between the trainer's policy and the engine's, and of its correction.

Names are verl's, without their prefix `rollout_corr/`. Shapes: B sequences, T positions, S spans.
Sequences without a trained token are not counted; a batch without trained tokens has no metrics.
Every function gets the whole batch of all ranks.
"""

import torch
from torch import Tensor

from agentrl.algorithms.correction.methods import AppliedTest, Rejected, RolloutWeights, Spans
from agentrl.algorithms.kl import MAX_LOG_RATIO

Metrics = dict[str, float]


def compute_offpolicy_metrics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> Metrics:
    """Measure the distance of the two policies, with or without a correction.

    With r the trainer's probability over the engine's: `kl` and `k3_kl` estimate KL(engine,
    trainer) by -log r and r - log r - 1; `chi2_token`, `chi2_seq` are mean(r^2) - 1 of tokens and
    of whole sequences; `ppl` are perplexities of sequences; `ratio_*` those of r by token.

    Args:
        old_log_probs: `[B, T]`, the trainer's.
        rollout_log_probs: `[B, T]`, the engine's.
        response_mask: `[B, T]`, nonzero at trained tokens.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    rows = Spans.of("sequence", mask)
    log_ratio = torch.where(mask, old_log_probs - rollout_log_probs, 0.0).double()
    of_tokens = log_ratio[mask].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    of_rows = rows.sum(log_ratio)[rows.has_tokens()].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratios = of_tokens.exp()
    return {
        "kl": _mean(-log_ratio[mask]),
        "k3_kl": _mean(ratios - of_tokens - 1),
        "chi2_token": _mean(ratios.square()) - 1,
        "chi2_seq": _mean((2 * of_rows).exp()) - 1,
        "ratio_mean": _mean(ratios),
        "ratio_max": float(ratios.max()),
        **_perplexities(rows, old_log_probs, rollout_log_probs),
    }


def _perplexities(rows: Spans, old_log_probs: Tensor, rollout_log_probs: Tensor) -> Metrics:
    there = rows.has_tokens()
    training, rollout = (-rows.mean(x)[there] for x in (old_log_probs, rollout_log_probs))
    apart = training - rollout
    return {
        "training_ppl": _mean(training.exp()),
        "training_log_ppl": _mean(training),
        "rollout_ppl": _mean(rollout.exp()),
        "rollout_log_ppl": _mean(rollout),
        "log_ppl_diff": _mean(apart),
        "log_ppl_abs_diff": _mean(apart.abs()),
        "log_ppl_diff_max": float(apart.max()),
        "log_ppl_diff_min": float(apart.min()),
        "ppl_ratio": _mean(apart.exp()),
    }


def compute_is_metrics(found: RolloutWeights) -> Metrics:
    """Describe importance weights before normalization.

    `eff_sample_size` is the effective share of the tokens: (sum of w)^2 / (number of tokens x sum
    of w^2), 0 if all weights are 0. By token, `max` and `min` are of the bounded weights; by turn
    and sequence, of the ratios. `ratio_fraction_high` is the share of ratios above the upper bound,
    `low` below the lower one (the reciprocal of the upper bound if there is none), `oob_ratio` the
    share of tokens with a weight set to 0.
    """
    mask = found.spans.mask
    if not mask.any():
        return {}
    weights = found.spans.on_tokens(found.applied)[mask]
    spread = found.applied if found.spans.level == "token" else found.raw
    spread, raw = (values[found.spans.has_tokens()] for values in (spread, found.raw))
    low = 1 / found.bounds.upper if found.bounds.lower is None else found.bounds.lower
    mean, square = weights.mean(), weights.square().mean()
    zeroed = found.spans.on_tokens(((found.applied == 0) & (found.raw > 0)).double())[mask]
    return {
        "rollout_is_mean": float(mean),
        "rollout_is_max": float(spread.max()),
        "rollout_is_min": float(spread.min()),
        "rollout_is_std": float((square - mean.square()).clamp(min=0).sqrt()),
        "rollout_is_eff_sample_size": float(mean.square() / square) if square > 0 else 0.0,
        "rollout_is_ratio_fraction_high": _mean((raw > found.bounds.upper).double()),
        "rollout_is_ratio_fraction_low": _mean((raw < low).double()),
        "rollout_is_oob_ratio": _mean(zeroed),
        "rollout_is_batch_norm_factor": found.factor,
        **_sequence_weights(found, low),
    }


def _sequence_weights(found: RolloutWeights, low: float) -> Metrics:
    rows = Spans.of("sequence", found.spans.mask)
    there = rows.has_tokens()
    mean = rows.mean(found.spans.on_tokens(found.applied))[there]
    raw = rows.mean(found.spans.on_tokens(found.raw))[there]
    return {
        "rollout_is_seq_mean": _mean(mean),
        "rollout_is_seq_std": float(mean.std()) if len(mean) > 1 else 0.0,
        "rollout_is_seq_max": float(mean.max()),
        "rollout_is_seq_min": float(mean.min()),
        "rollout_is_seq_max_deviation": float((mean - 1).abs().max()),
        "rollout_is_seq_fraction_high": _mean((raw > found.bounds.upper).double()),
        "rollout_is_seq_fraction_low": _mean((raw < low).double()),
    }


def compute_rs_metrics(found: Rejected, response_mask: Tensor) -> Metrics:
    """Describe what was rejected, in total and by each test.

    `masked_fraction` is a share of the trained tokens, `seq_masked_fraction` that of the sequences
    with any token rejected. Of each test: mean and deviation of its statistic over tokens,
    extremes, and the share of its spans outside the bounds.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    metrics = _shares("rollout_rs", found.kept, mask)
    metrics["rollout_rs_rejected_sequences"] = float((mask.any(-1) & ~found.kept.any(-1)).sum())
    for test in found.tests:
        name = f"rollout_rs_{test.rejection.name}"
        metrics |= _shares(name, test.passed, mask) | _statistic(name, test)
    return metrics


def _shares(name: str, kept: Tensor, mask: Tensor) -> Metrics:
    rejected = mask & ~kept
    return {
        f"{name}_masked_fraction": _mean(rejected[mask].double()),
        f"{name}_seq_masked_fraction": _mean(rejected.any(-1)[mask.any(-1)].double()),
    }


def _statistic(name: str, test: AppliedTest) -> Metrics:
    values = test.values[test.spans.has_tokens()]
    lower, upper = test.bounds
    below = values < lower if lower is not None else torch.zeros_like(values)
    on_tokens = test.spans.on_tokens(test.values)[test.spans.mask]
    bounded = on_tokens.clamp(0.0 if lower is None else lower, upper)
    return {
        f"{name}_mean": _mean(on_tokens),
        f"{name}_std": float(bounded.std(correction=0)),
        f"{name}_max": float(values.max()),
        f"{name}_min": float(values.min()),
        f"{name}_fraction_high": _mean((values > upper).double()),
        f"{name}_fraction_low": _mean(below.double()),
    }


def _mean(values: Tensor) -> float:
    return float(values.mean())
