"""Every policy loss as a loop over the trained tokens of one row, from its paper's formula."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from agentrl.algorithms import get_policy_loss_fn, policy_loss_names
from agentrl.config.schema.training import ActorConfig

BUDGET = 16
RAGGED = torch.tensor([[1, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 1, 0]])
CONFIGS = {
    "dro": {"policy_loss": {"loss_mode": "dro", "dro_beta": 0.5}},
    "dppo_tv": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.2},
    "dppo_kl": {"clip_ratio_low": 0.001, "clip_ratio_high": 0.002, "clip_ratio_c": 1.2},
    "clip_cov": {"policy_loss": {"clip_cov_ratio": 0.4, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0}},
    "kl_cov": {"policy_loss": {"kl_cov_ratio": 0.4, "ppo_kl_coef": 0.3}},
    "bypass_mode": {
        "policy_loss": {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "sequence"}}
    },
}
CLIPS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}


def config_of(name: str) -> ActorConfig:
    """Settings under which every branch of a loss is met."""
    return ActorConfig.model_validate(CLIPS | CONFIGS.get(name, {}))


def invariant_losses() -> list[str]:
    """The bundled losses, without the reference's that break an invariant by name."""
    return [
        name
        for name in policy_loss_names()
        if get_policy_loss_fn(name).__module__.startswith("agentrl.")  # pyright: ignore
        and not name.endswith("_verl")
    ]


class Row(NamedTuple):
    """The trained tokens of one row."""

    old: list[float]
    new: list[float]
    frozen: list[float]
    """The log-probabilities at which the stopped factors stand."""
    advantages: list[float]
    chosen: list[float]
    """How far each token is held back for its high covariance."""


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clips(c: ActorConfig) -> tuple[float, float]:
    assert c.clip_ratio_low is not None
    assert c.clip_ratio_high is not None
    return c.clip_ratio_low, c.clip_ratio_high


def clipped(ratio: float, advantage: float, c: ActorConfig) -> float:
    low, high = clips(c)
    inside = clip(ratio, 1 - low, 1 + high)
    return max(-advantage * ratio, -advantage * inside)


def vanilla(row: Row, c: ActorConfig) -> list[float]:
    found = plain_clip(row, c)
    return [
        min(loss, -a * c.clip_ratio_c) if a < 0 else loss
        for loss, a in zip(found, row.advantages, strict=True)
    ]


def plain_clip(row: Row, c: ActorConfig) -> list[float]:
    return [
        clipped(math.exp(new - old), a, c)
        for old, new, a in zip(row.old, row.new, row.advantages, strict=True)
    ]


def gspo(row: Row, c: ActorConfig) -> list[float]:
    log_ratios = [new - old for new, old in zip(row.frozen, row.old, strict=True)]
    ratio = math.exp(math.fsum(log_ratios) / len(log_ratios))
    return [
        clipped(ratio * math.exp(new - frozen), a, c)
        for new, frozen, a in zip(row.new, row.frozen, row.advantages, strict=True)
    ]


def geo_mean(row: Row, c: ActorConfig) -> list[float]:
    low, high = clips(c)
    logs = []
    for old, new, a in zip(row.old, row.new, row.advantages, strict=True):
        logs.append(min(new - old, high) if a > 0 else max(new - old, -low))
    ratio = math.exp(math.fsum(logs) / len(logs))
    return [-a * ratio for a in row.advantages]


def sapo(row: Row, c: ActorConfig) -> list[float]:
    found = []
    for old, new, a in zip(row.old, row.new, row.advantages, strict=True):
        tau = c.tau_pos if a > 0 else c.tau_neg
        found.append(-a * 4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1))))
    return found


def vespo(row: Row, c: ActorConfig) -> list[float]:
    weight = math.exp(math.fsum(f - old for f, old in zip(row.frozen, row.old, strict=True)))
    own, found = c.policy_loss, []
    for new, a in zip(row.new, row.advantages, strict=True):
        k, rate = (own.vespo_k_pos, own.vespo_lambda_pos)
        if a < 0:
            k, rate = (own.vespo_k_neg, own.vespo_lambda_neg)
        found.append(-a * weight**k * math.exp(rate * (1 - weight)) * new)
    return found


def dppo_tv(row: Row, c: ActorConfig) -> list[float]:
    low, high = clips(c)
    found = []
    for old, new, frozen, a in zip(row.old, row.new, row.frozen, row.advantages, strict=True):
        rise = math.exp(frozen) - math.exp(old)
        is_kept = rise <= high if a > 0 else rise >= -low
        found.append(-a * min(math.exp(frozen - old), c.clip_ratio_c) * new * is_kept)
    return found


def dppo_kl(row: Row, c: ActorConfig) -> list[float]:
    low, high = clips(c)
    found = []
    for old, new, frozen, a in zip(row.old, row.new, row.frozen, row.advantages, strict=True):
        p, q = math.exp(old), math.exp(frozen)
        kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        leaves = kl > (high if a > 0 else low)
        is_kept = not (leaves and (q > p if a > 0 else q < p))
        found.append(-a * min(q / p, c.clip_ratio_c) * new * is_kept)
    return found


def gpg(row: Row, c: ActorConfig) -> list[float]:
    return [-a * new for new, a in zip(row.new, row.advantages, strict=True)]


def cispo(row: Row, c: ActorConfig) -> list[float]:
    low, high = clips(c)
    return [
        -a * clip(math.exp(frozen - old), 1 - low, 1 + high) * new
        for old, new, frozen, a in zip(row.old, row.new, row.frozen, row.advantages, strict=True)
    ]


def dro(row: Row, c: ActorConfig) -> list[float]:
    beta = c.policy_loss.dro_beta
    assert beta is not None
    return [
        -(new * a - beta / 2 * (new - old) ** 2)
        for old, new, a in zip(row.old, row.new, row.advantages, strict=True)
    ]


def clip_cov(row: Row, c: ActorConfig) -> list[float]:
    free = [
        -a * math.exp(new - old)
        for old, new, a in zip(row.old, row.new, row.advantages, strict=True)
    ]
    # A chosen token whose ratio is clipped has no gradient already, and keeps its loss.
    return [
        (1 - chosen) * loss if loss == untouched else loss
        for loss, untouched, chosen in zip(plain_clip(row, c), free, row.chosen, strict=True)
    ]


def kl_cov(row: Row, c: ActorConfig) -> list[float]:
    return [
        -a * math.exp(new - old) + chosen * c.policy_loss.ppo_kl_coef * abs(new - old)
        for old, new, a, chosen in zip(row.old, row.new, row.advantages, row.chosen, strict=True)
    ]


def bypass_mode(row: Row, c: ActorConfig) -> list[float]:
    threshold = c.policy_loss.rollout_correction.rollout_is_threshold
    ratio = math.exp(math.fsum(f - old for f, old in zip(row.frozen, row.old, strict=True)))
    return [min(ratio, float(threshold)) * loss for loss in gpg(row, c)]


NAIVE: dict[str, Callable[[Row, ActorConfig], list[float]]] = {
    "vanilla": vanilla,
    "dr_grpo": plain_clip,
    "bnpo": plain_clip,
    "gspo": gspo,
    "luspo": gspo,
    "geo_mean": geo_mean,
    "sapo": sapo,
    "vespo": vespo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gpg": gpg,
    "cispo": cispo,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "bypass_mode": bypass_mode,
}


class Batch(NamedTuple):
    """`[B, T]` each, float64."""

    old: torch.Tensor
    new: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor


def make_batch(mask: torch.Tensor, seed: int = 0) -> Batch:
    """Log-probabilities that moved by about 0.4, advantages and weights of any size."""
    generator = torch.Generator().manual_seed(seed)
    old, moved, advantages, weights = torch.randn(
        4, *mask.shape, generator=generator, dtype=torch.float64
    )
    old = -old.abs() - 0.5
    new = torch.minimum(old + 0.4 * moved, torch.tensor(-0.01, dtype=torch.float64))
    return Batch(old, new, advantages, weights.exp(), mask)


def choose(name: str, batch: Batch) -> list[list[float]]:
    """How far the losses by covariance hold each token back, by sorting all of them."""
    own, places = config_of(name).policy_loss, batch.mask.nonzero().tolist()
    chosen = [[0.0] * batch.mask.shape[1] for _ in batch.mask]
    if name not in ("clip_cov", "kl_cov") or not places:
        return chosen
    old = [batch.old[i, t].item() for i, t in places]
    advantages = [batch.advantages[i, t].item() for i, t in places]
    mean_old, mean_advantage = math.fsum(old) / len(old), math.fsum(advantages) / len(old)
    covariances = [
        (o - mean_old) * (a - mean_advantage) for o, a in zip(old, advantages, strict=True)
    ]
    share = own.kl_cov_ratio if name == "kl_cov" else own.clip_cov_ratio
    ranked = sorted(range(len(places)), key=lambda n: -covariances[n])
    if name == "clip_cov":
        ranked = [n for n in ranked if own.clip_cov_lb < covariances[n] < own.clip_cov_ub]
    num_chosen = min(max(1, int(share * len(places))), len(ranked))
    least = min((covariances[n] for n in ranked[:num_chosen]), default=0)
    tied = [n for n in ranked if abs(covariances[n] - least) <= 1e-12]
    above = [n for n in ranked if covariances[n] > least and n not in tied]
    for n in [*above, *tied]:  # the places that are left are shared
        i, t = places[n]
        chosen[i][t] = 1.0 if n in above else (num_chosen - len(above)) / len(tied)
    return chosen


def naive_agg(rows: list[list[float]], mode: str) -> float:
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    sums = [math.fsum(row) for row in rows]
    return {
        "token-mean": math.fsum(sums) / sum(map(len, rows)),
        "token-sum": math.fsum(sums),
        "seq-mean-token-sum": math.fsum(sums) / len(rows),
        "seq-mean-token-sum-norm": math.fsum(sums) / len(rows) / BUDGET,
        "seq-mean-token-mean": math.fsum(
            total / len(row) for total, row in zip(sums, rows, strict=True)
        ) / len(rows),
    }[mode]  # fmt: skip


def naive_loss(
    name: str, mode: str, batch: Batch, new: torch.Tensor, chosen: list[list[float]]
) -> float:
    """The mini-batch's loss at `new`, with the factors that are stopped left at `batch.new`."""
    rows: list[list[float]] = []
    for i, bits in enumerate(batch.mask.tolist()):
        inside = [t for t, bit in enumerate(bits) if bit]
        row = Row(
            *([column[i, t].item() for t in inside] for column in (batch.old, new, batch.new)),
            advantages=[batch.advantages[i, t].item() for t in inside],
            chosen=[chosen[i][t] for t in inside],
        )
        losses = NAIVE[name](row, config_of(name)) if inside else []
        weights = [batch.weights[i, t].item() for t in inside]
        rows.append([loss * weight for loss, weight in zip(losses, weights, strict=True)])
    return naive_agg(rows, mode)
