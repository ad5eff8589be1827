"""KL, its controllers and penalty, and the rollout correction beside verl's."""

from dataclasses import fields
from typing import Any

import torch
from verl.trainer.config.algorithm import RolloutCorrectionConfig as VerlConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo import rollout_corr_helper as verl
from verl.utils.torch_functional import masked_mean

from agentrl.algorithms import kl_penalty
from agentrl.algorithms.correction import (
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from agentrl.algorithms.kl import (
    AdaptiveKLController,
    compute_reward_kl,
    measure_kl,
    penalize_rewards,
)
from agentrl.config.schema.correction import PRESETS, RolloutCorrectionConfig
from benchmarks.verl_parity.batches import make_batch
from benchmarks.verl_parity.comparison import Comparison, compare

KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+")
TESTS = {
    "token_k1": "0.8_1.3", "token_k2": 0.02, "token_k3": 0.02,
    "seq_sum_k1": "0.5_2.0", "seq_sum_k2": 0.3, "seq_sum_k3": 0.3,
    "seq_mean_k1": "0.97_1.03", "seq_mean_k2": 0.018, "seq_mean_k3": 0.018,
    "seq_max_k2": 0.1, "seq_max_k3": 0.1,
    "token_k1,seq_mean_k3": "0.8_1.3,0.02",
}  # fmt: skip
WEIGHTS = ((2.0, False), (1.1, True), ("0.8_1.2", False), ("0.8_1.2", True))
EMPTY_ROW = "a row in which nothing is trained is in no mean"
METRICS_OF_ROWS = (
    "training_ppl", "rollout_ppl", "log_ppl_diff", "chi2_seq", "ppl_ratio", "log_ppl_abs_diff",
)  # fmt: skip


def check() -> list[Comparison]:
    """Make the lines of the table."""
    return [
        *_kl(), *_penalty(), *_controller(), *_weights(), *_rejection(), *_metrics(), *_presets(),
    ]  # fmt: skip


class _Batch:
    """Log-probabilities of two policies that are a little apart."""

    def __init__(self, seed: int) -> None:
        batch = make_batch(seed)
        generator = torch.Generator().manual_seed(seed)
        shape = batch.mask.shape
        self.mask, self.scores = batch.mask, batch.rewards
        self.old = -torch.rand(shape, generator=generator) * 3 - 0.05
        self.rollout = self.old + torch.randn(shape, generator=generator) * 0.2
        self.log_ratio = self.old - self.rollout


def _kl() -> list[Comparison]:
    batch, lines = _Batch(0), list[Comparison]()
    for name in KL_NAMES:
        found, expected = (
            _value_and_gradient(function, batch, name)
            for function in (kl_penalty, core_algos.kl_penalty)
        )
        lines.append(compare(f"kl_penalty {name}", found[0], expected[0]))
        lines.append(compare(f"kl_penalty {name}, gradient", found[1], expected[1]))
    return lines


def _value_and_gradient(function: Any, batch: _Batch, name: str) -> tuple[Any, Any]:
    log_probs = batch.old.clone().requires_grad_()
    value = function(log_probs, batch.rollout, kl_penalty=name)
    return value.detach(), torch.autograd.grad(value.sum(), log_probs)[0]


def _penalty() -> list[Comparison]:
    """Put the reference's parts together as its trainer does, which needs all of its packages."""
    lines: list[Comparison] = []
    for name in ("kl", "abs", "mse", "low_var_kl"):
        batch = _Batch(1)
        theirs = core_algos.AdaptiveKLController(0.3, target_kl=0.1, horizon=1000)
        expected_kl = core_algos.kl_penalty(batch.old, batch.rollout, name) * batch.mask
        expected = batch.scores - theirs.value * expected_kl
        mean = float(masked_mean(expected_kl, batch.mask, axis=-1).mean())
        theirs.update(mean, len(batch.mask))
        own = AdaptiveKLController(0.3, target_kl=0.1, horizon=1000)
        kl = compute_reward_kl(batch.old, batch.rollout, batch.mask, name)
        rewards = penalize_rewards(batch.scores, kl, own.value)
        measured = measure_kl(kl, batch.mask)
        own.update(measured.current_kl, measured.num_sequences)
        label = f"KL in the reward, {name}"
        lines.append(compare(label, rewards, expected))
        numbers = [measured.current_kl, own.value], [mean, float(theirs.value)]
        lines.append(_numbers(f"{label}: its mean and the next weight", *numbers))
    return lines


def _controller() -> list[Comparison]:
    kls = (0.0, 0.05, 0.11, 0.3, -0.2, 0.1)
    values: list[list[float]] = []
    for make in (AdaptiveKLController, core_algos.AdaptiveKLController):
        control, seen = make(0.1, 0.1, 1000), list[float]()
        for kl in kls:
            control.update(kl, 64)
            seen.append(float(control.value))
        values.append(seen)
    return [_numbers("AdaptiveKLController", *values)]


def _weights() -> list[Comparison]:
    lines: list[Comparison] = []
    for level in ("token", "sequence"):
        for threshold, normal in WEIGHTS:
            batch = _Batch(2)
            ours, told = compute_rollout_correction_weights(
                batch.log_ratio, batch.mask, level, threshold, normal
            )
            theirs, expected = verl.compute_rollout_correction_weights(
                batch.log_ratio, batch.mask, level, threshold, normal
            )
            label = f"weights by {level}, {threshold}{', normalised' if normal else ''}"
            lines.append(compare(label, ours, theirs))
            lines.append(_shared_metrics(f"{label}: metrics", told, expected))
    return lines


def _rejection() -> list[Comparison]:
    lines: list[Comparison] = []
    for tests, threshold in TESTS.items():
        batch = _Batch(3)
        ours, told = compute_rollout_rejection_mask(batch.log_ratio, batch.mask, tests, threshold)
        theirs, expected = verl.compute_rollout_rejection_mask(
            batch.log_ratio, batch.mask, tests, threshold
        )
        lines.append(compare(f"rejection {tests}", ours, theirs))
        lines.append(_shared_metrics(f"rejection {tests}: metrics", told, expected))
    return lines


def _metrics() -> list[Comparison]:
    batch, lines = _Batch(4), list[Comparison]()
    lines.append(_off_policy("off-policy metrics", batch))
    batch.mask = batch.mask.clone()
    batch.mask[3] = 0
    lines.append(_off_policy("off-policy metrics, a masked row", batch, reason=EMPTY_ROW))
    return [*lines, _no_weight_survives()]


def _off_policy(label: str, batch: _Batch, *, reason: str = "") -> Comparison:
    ours = compute_rollout_correction_and_rejection_mask(
        batch.old, batch.rollout, batch.mask, RolloutCorrectionConfig()
    ).metrics
    theirs = verl.compute_offpolicy_metrics(batch.old, batch.rollout, batch.mask)
    plain = {name.removeprefix("rollout_corr/"): value for name, value in ours.items()}
    if reason:
        plain = {name: plain[name] for name in METRICS_OF_ROWS}
    return _shared_metrics(label, plain, theirs, reason=reason)


def _no_weight_survives() -> Comparison:
    """Compare what is left where IcePop leaves nothing: the reference divides by zero."""
    log_ratio, mask = torch.full((2, 3), 5.0), torch.ones(2, 3)
    ours, _ = compute_rollout_correction_weights(log_ratio, mask, "token", "0.5_2.0", True)
    try:
        theirs, _ = verl.compute_rollout_correction_weights(
            log_ratio, mask, "token", "0.5_2.0", True
        )
    except ZeroDivisionError:
        theirs = torch.full_like(ours, torch.nan)
    reason = "no weight survives: 0 here, a division by zero there"
    return compare("weights, IcePop leaves none", ours, theirs, by_design=reason)


def _presets() -> list[Comparison]:
    """A preset's keys, as numbers: equal, or not."""
    names = {field.name for field in fields(VerlConfig)}
    lines: list[Comparison] = []
    for preset in PRESETS:
        own = RolloutCorrectionConfig.model_validate({"preset": preset}).effective
        theirs = getattr(VerlConfig, preset)()
        differing = [
            name for name in sorted(names)
            if hasattr(own, name) and str(getattr(own, name)) != str(getattr(theirs, name))
        ]  # fmt: skip
        lines.append(_numbers(f"preset {preset}", [float(len(differing))], [0.0]))
    return lines


def _shared_metrics(
    label: str, ours: dict[str, float], theirs: dict[str, float], *, reason: str = ""
) -> Comparison:
    names = sorted(ours.keys() & theirs.keys())
    own, other = ([float(numbers[name]) for name in names] for numbers in (ours, theirs))
    return _numbers(f"{label} ({len(names)})", own, other, reason=reason)


def _numbers(label: str, ours: list[float], theirs: list[float], *, reason: str = "") -> Comparison:
    found, expected = (torch.tensor(x, dtype=torch.float64) for x in (ours, theirs))
    return compare(label, found, expected, by_design=reason)
