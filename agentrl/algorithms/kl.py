"""Estimates of the KL divergence to a reference, per token, from the sampled token alone."""

from collections.abc import Callable

import torch

from agentrl.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this in both directions before they are exponentiated."""
MAX_K3 = 10.0
"""The k3 estimate of one token is clamped to this."""


def kl_penalty(
    logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str = "k3"
) -> torch.Tensor:
    """Estimate KL(policy, reference) at each token.

    ========== ============== ==================================================
    name       also named     with d = logprob - ref_logprob
    ========== ============== ==================================================
    `k1`       `kl`           d: unbiased, of either sign; its gradient says nothing of the KL
    `abs`                     |d|
    `k2`       `mse`          d^2 / 2: biased, and its expected gradient is the KL's
    `k3`       `low_var_kl`   exp(-d) + d - 1: unbiased, never negative
    `<name>+`                 the value of `<name>` with the gradient of k2
    ========== ============== ==================================================

    Source: Schulman, "Approximating KL divergence" (2020); names and clamps are verl's.

    Args:
        logprob: Of the policy, with gradient, any shape.
        ref_logprob: Of the reference, same shape.
        kl_penalty: A name of the table.

    Raises:
        ConfigError: for another name.
    """
    difference = logprob - ref_logprob
    estimate = _estimator(kl_penalty.removesuffix("+"))(difference)
    if not kl_penalty.endswith("+"):
        return estimate
    carrier = _k2(difference)
    return carrier - carrier.detach() + estimate.detach()


def _k1(difference: torch.Tensor) -> torch.Tensor:
    return difference


def _k2(difference: torch.Tensor) -> torch.Tensor:
    return 0.5 * difference.square()


def _k3(difference: torch.Tensor) -> torch.Tensor:
    clamped = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.exp(-clamped) + clamped - 1).clamp(max=MAX_K3)


_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": _k1,
    "kl": _k1,
    "abs": torch.abs,
    "k2": _k2,
    "mse": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
}


def _estimator(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in _ESTIMATORS:
        raise ConfigError(
            f"unknown KL estimate {name!r}",
            key="actor.kl_loss_type",
            expected=f"one of {', '.join(_ESTIMATORS)}, each also with a + behind it",
        )
    return _ESTIMATORS[name]
