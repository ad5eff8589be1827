"""Sample one token for each row of a batch, with the row's own temperature, top-k and top-p.

Shape key: R rows (one for each sequence), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from agentrl.engines.protocol import SamplingParams


class Draw(NamedTuple):
    """One row's sampling parameters, and its random number."""

    sampling: SamplingParams
    uniform: float
    """In [0, 1): the token is taken at this point of the cumulative distribution."""


class Sampled(NamedTuple):
    """The result of one step."""

    token_ids: torch.Tensor
    """[R] int64."""
    log_probs: torch.Tensor
    """[R] float32, `log_softmax(logits / T)` over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of the rows as tensors; None: no row needs it, so it costs nothing."""

    temperatures: torch.Tensor
    """[R] float32, 1 for greedy rows."""
    uniforms: torch.Tensor
    """[R, 1], each in [0, 1)."""
    greedy: torch.Tensor | None
    """[R] bool."""
    top_k: torch.Tensor | None
    """[R, 1] int64, V where a row does not limit it."""
    top_p: torch.Tensor | None
    """[R, 1] float32."""

    @classmethod
    def of(cls, draws: Sequence[Draw], *, vocab_size: int, device: torch.device) -> Self:
        """Return the rows' parameters as tensors on `device`."""
        params = [draw.sampling for draw in draws]

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device).unsqueeze(1)

        greedy = [p.temperature == 0 for p in params]
        top_k = [p.top_k if p.top_k > 0 else vocab_size for p in params]
        limited = any(k < vocab_size for k in top_k)
        nucleus = any(p.top_p < 1 for p in params)
        # In float32, rounding would lose the increments of a large vocabulary's rare tokens.
        cumulative_dtype = torch.float32 if device.type == "mps" else torch.float64
        return cls(
            temperatures=column([p.temperature or 1.0 for p in params], torch.float32).squeeze(1),
            uniforms=column([draw.uniform for draw in draws], cumulative_dtype),
            greedy=column(greedy, torch.bool).squeeze(1) if any(greedy) else None,
            top_k=column(top_k, torch.int64) if limited else None,
            top_p=column([p.top_p for p in params], torch.float32) if nucleus else None,
        )


def sample_tokens(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    """Sample one token for each row, by inversion of its cumulative distribution.

    Each row has its own uniform number, so its randomness does not depend on the other rows of the
    batch.

    Args:
        logits: [R, V], of any floating type; scored in float32.
        rows: How each row samples.
    """
    log_probs = torch.log_softmax(logits.float() / rows.temperatures.unsqueeze(1), dim=-1)
    probs = log_probs.exp()
    if rows.top_k is not None or rows.top_p is not None:
        probs = _truncate(probs, rows)
    cumulative = probs.cumsum(dim=-1, dtype=rows.uniforms.dtype)
    # A token with probability zero is never the first whose cumulative mass exceeds the threshold.
    # By rounding, the threshold could be the whole mass, which no token exceeds.
    mass = cumulative[:, -1:]
    below = mass * (1 - torch.finfo(mass.dtype).eps)
    token_ids = torch.searchsorted(cumulative, (rows.uniforms * mass).minimum(below), right=True)
    token_ids = token_ids.squeeze(1).clamp_(max=logits.shape[-1] - 1)
    if rows.greedy is not None:
        token_ids = torch.where(rows.greedy, logits.argmax(dim=-1), token_ids)
    return Sampled(token_ids, log_probs.gather(1, token_ids.unsqueeze(1)).squeeze(1))


def _truncate(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Set to zero what top-k excludes, and what top-p excludes of the rest; without rescaling."""
    ordered, order = probs.sort(dim=-1, descending=True)
    if rows.top_k is not None:
        ranks = torch.arange(probs.shape[-1], device=probs.device)
        ordered = ordered.masked_fill(ranks >= rows.top_k, 0.0)
    if rows.top_p is not None:
        share = ordered / ordered.sum(dim=-1, keepdim=True)
        mass_before = share.cumsum(dim=-1) - share
        outside = (mass_before >= rows.top_p) & (rows.top_p < 1)
        outside[:, 0] = False
        ordered = ordered.masked_fill(outside, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ordered)
