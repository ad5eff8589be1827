"""Log-probabilities and entropy of trained tokens, without the logits of a whole micro-batch.

`log_softmax(logits / T)` over the full vocabulary, T the rollout's temperature. The head runs on
the trained positions alone and in chunks; the backward pass recomputes each chunk's logits, so at
no moment do more than `chunk` rows of logits exist.

Shape key: N trained positions, H hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig


class HeadTransform(NamedTuple):
    """What a model does to the logits behind its head: `cap * tanh(scale * logits / cap)`."""

    scale: float = 1.0
    """Factor of the logits, the temperature not included."""
    cap: float | None = None
    """Soft cap of the scaled logits; None: not capped."""


class TokenScores(NamedTuple):
    """What the policy says of tokens that were sampled; `[N]` packed or `[B, T]` padded."""

    log_probs: Tensor
    """float32."""
    entropy: Tensor
    """float32, in nats; of the distribution that the token was drawn from."""


def read_head_transform(config: PretrainedConfig) -> HeadTransform:
    """Read from a model's configuration what it does behind its head."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    return HeadTransform(scale / divisor, getattr(config, "final_logit_softcapping", None))


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    transform: HeadTransform,
    chunk: int,
) -> TokenScores:
    """Score each target under the distribution that the head makes of its hidden state.

    Args:
        hidden: `[N, H]`, what the decoder's body gave at the position before each target.
        weight: `[V, H]`, the head.
        bias: `[V]`, or None.
        targets: `[N]`, int64.
        temperature: The rollout's.
        transform: What the model does behind its head.
        chunk: Rows of logits that exist at once.
    """
    log_probs, entropy = _ChunkedHead.apply(  # pyright: ignore[reportGeneralTypeIssues]
        hidden, weight, bias, targets, temperature, transform, chunk
    )
    return TokenScores(log_probs, entropy)


class _ChunkedHead(torch.autograd.Function):
    """The head, the temperature and the softmax in one, chunk by chunk in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        transform: HeadTransform,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        entropy, normalizer = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for part in _chunks(len(targets), chunk):
            logits = _logits(hidden[part], weight, bias, transform)[0].div_(temperature)
            chosen = logits.gather(1, targets[part, None]).squeeze(1)
            largest = logits.amax(dim=1)
            mass = (logits - largest[:, None]).exp_()
            total = mass.sum(dim=1)
            norm = largest + total.log()
            normalizer[part] = norm
            log_probs[part] = chosen - norm
            entropy[part] = norm - torch.linalg.vecdot(mass, logits) / total
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.transform, ctx.chunk = temperature, transform, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=normalizer.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=normalizer.dtype)
        for part in _chunks(len(targets), ctx.chunk):
            raw, slope = _logits(hidden[part], weight, bias, ctx.transform)
            logits = raw.div_(ctx.temperature)
            grad = _grad_logits(
                logits, targets[part], normalizer[part], entropy[part],
                None if grad_log_probs is None else grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
            )  # fmt: skip
            grad.mul_(slope if slope is not None else ctx.transform.scale).div_(ctx.temperature)
            grad = grad.to(weight.dtype)
            grad_hidden[part] = (grad @ weight).to(hidden.dtype)
            grad_weight += grad.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None, None,
        )  # fmt: skip


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: HeadTransform
) -> tuple[Tensor, Tensor | None]:
    """Logits in float32 as the model makes them, and their slope by the head's output if capped."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if transform.scale != 1.0:
        logits = logits * transform.scale
    if transform.cap is None:
        return logits, None
    squashed = (logits / transform.cap).tanh_()
    return squashed * transform.cap, (1 - squashed.square()) * transform.scale


def _grad_logits(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient by the logits, from `d log p_t / dz = 1_t - p` and `dH / dz = -p (log p + H)`."""
    log_p = logits - normalizer[:, None]
    probs = log_p.exp()
    if grad_entropy is None:
        grad = torch.zeros_like(probs)
    else:
        grad = log_p.add_(entropy[:, None]).mul_(probs).mul_(-grad_entropy[:, None])
    if grad_log_probs is not None:
        grad.addcmul_(probs, grad_log_probs[:, None], value=-1)
        grad.scatter_add_(1, targets[:, None], grad_log_probs[:, None])
    return grad
