"""Statistics over trained positions alone; what stands elsewhere, NaN included, has no effect."""

import torch

WHITENING_EPSILON = 1e-8
"""Added to a variance that is divided by."""


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum the values at unmasked positions."""
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average the values at unmasked positions; 0 where there are none."""
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Variance at unmasked positions, with n - 1 in the denominator; 0 where n < 2."""
    squares = (values - masked_mean(values, mask)).square()
    return masked_sum(squares, mask) / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1 over unmasked positions; 0 elsewhere.

    Computed in float64. Values that are all equal become exactly 0 (equal rewards train nothing).

    Args:
        values: Any shape.
        mask: Same shape, nonzero where a value counts.
    """
    inside = mask.bool()
    seen = values[inside].double()
    is_constant = (seen == seen[:1]).all()
    centred = seen - seen.sum() / max(seen.numel(), 1)
    variance = centred.square().sum() / max(seen.numel() - 1, 1)
    whitened = torch.where(is_constant, 0.0, centred * (variance + WHITENING_EPSILON).rsqrt())
    return torch.zeros_like(values).masked_scatter(inside, whitened.to(values.dtype))
