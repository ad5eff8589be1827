"""Log-probabilities and entropy of trained tokens, without the logits of a whole micro-batch.

`log_softmax(logits / T)` over the full vocabulary, T the rollout's temperature. The head runs on
the trained positions only, in blocks of positions times vocabulary. The forward pass updates a
softmax over a row's blocks; the backward pass recomputes each block. So only one block of logits
exists at a time, for any number of tokens and any vocabulary.

On a CPU this is fast because a block stays in the cache: with a vocabulary of 151,669, 1,024
trained tokens and hidden size 64, both passes took half of the time of full logits, and a quarter
of that of chunks of 1,024 whole rows. A few whole rows at a time would also stay in the cache, but
would read the head's weight once per chunk.

Shape key: N trained positions, H hidden, V vocabulary; n, v: those of one block.
"""

from math import inf, isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

CPU_BLOCK_BYTES = 2 * 2**20
"""A block of this size stays in the cache between the passes over it."""
DEVICE_BLOCK_BYTES = 256 * 2**20
"""A block of this size is large enough for matrix products at full speed."""


class HeadTransform(NamedTuple):
    """A model's transform of its logits: `cap * tanh(scale * logits / cap)`."""

    scale: float = 1.0
    """Factor of the logits, without the temperature."""
    cap: float | None = None
    """Soft cap of the scaled logits; None: not capped."""


class TokenScores(NamedTuple):
    """The policy's scores of sampled tokens; `[N]` packed or `[B, T]` padded."""

    log_probs: Tensor
    """float32."""
    entropy: Tensor
    """float32, in nats: the entropy of the token's distribution."""
    sum_pi_squared: Tensor | None = None
    """float32: sum over the vocabulary of the squared probabilities, without gradient; None if
    it was not requested."""


def read_head_transform(config: PretrainedConfig) -> HeadTransform:
    """Read the transform of the logits from a model's configuration."""
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
    block_bytes: int | None = None,
    with_sum_pi_squared: bool = False,
) -> TokenScores:
    """Score each target under the distribution that the head computes from its hidden state.

    Args:
        hidden: `[N, H]`, the decoder's last hidden state at the position before each target.
        weight: `[V, H]`, the head.
        bias: `[V]`, or None.
        targets: `[N]`, int64.
        temperature: The rollout's.
        transform: The model's transform of its logits.
        block_bytes: Bytes of one block of logits in float32. Two exist at once, half a block more
            for 16-bit weights, and one more in the backward pass of a soft cap. None: a default for
            the device.
        with_sum_pi_squared: Also sum the squared probabilities: one more pass over each block.
    """
    if block_bytes is None:
        block_bytes = CPU_BLOCK_BYTES if hidden.device.type == "cpu" else DEVICE_BLOCK_BYTES
    return TokenScores(
        *_BlockedHead.apply(  # pyright: ignore[reportGeneralTypeIssues]
            hidden, weight, bias, targets, transform, temperature, block_bytes, with_sum_pi_squared
        )
    )


class _Head(NamedTuple):
    """Computes logits from hidden states."""

    weight: Tensor
    bias: Tensor | None
    transform: HeadTransform
    temperature: float

    @property
    def factor(self) -> float:
        """Derivative of the logits with respect to the product with the weight, without a cap."""
        return self.transform.scale / self.temperature

    def logits(self, hidden: Tensor, columns: slice, memory: Tensor) -> Tensor:
        """Compute one block `[n, v]`, divided by the temperature, in `memory`."""
        out = memory if memory.dtype == hidden.dtype else None
        product = torch.mm(hidden, self.weight[columns].T, out=out)
        if self.bias is not None:
            product += self.bias[columns]
        # Write into `memory` to avoid a second float32 block: only a 16-bit product is allocated.
        logits = product if out is memory else memory.copy_(product)
        cap = self.transform.cap
        if cap is None:
            return logits if self.factor == 1.0 else logits.mul_(self.factor)
        return logits.mul_(self.transform.scale / cap).tanh_().mul_(cap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Return the factor of the derivative that the cap adds to `factor`; None without a cap."""
        cap = self.transform.cap
        if cap is None:
            return None
        return (logits * (self.temperature / cap)).square_().neg_().add_(1)


class _Softmax(NamedTuple):
    """Softmax of n rows over the columns seen so far, `[n]` each."""

    largest: Tensor
    """The largest logit."""
    total: Tensor
    """Sum of `exp(logit - largest)`."""
    weighted: Tensor
    """Sum of `exp(logit - largest) * logit`."""
    chosen: Tensor
    """The target's logit; 0 until its column is seen."""
    squares: Tensor | None
    """Sum of `exp(logit - largest) ** 2`; None: not requested."""

    @classmethod
    def empty(cls, like: Tensor, *, with_squares: bool) -> "_Softmax":
        """Start before the first column; `like` is `[n]`."""
        zeros = torch.zeros_like(like)
        squares = zeros if with_squares else None
        return cls(torch.full_like(like, -inf), zeros, zeros, zeros, squares)

    def update(self, logits: Tensor, target: Tensor, memory: Tensor) -> "_Softmax":
        """Add a block `[n, v]`; `target` is the target's column, if the block contains it."""
        largest = torch.maximum(self.largest, logits.amax(dim=1))
        shrink = (self.largest - largest).exp()
        mass = torch.sub(logits, largest[:, None], out=memory).exp_()
        inside, column = _locate(target, logits.shape[1])
        chosen = logits.gather(1, column[:, None]).squeeze(1)
        squares = self.squares
        if squares is not None:
            squares = squares * shrink.square() + torch.linalg.vecdot(mass, mass)
        return _Softmax(
            largest,
            self.total * shrink + mass.sum(dim=1),
            self.weighted * shrink + torch.linalg.vecdot(mass, logits),
            torch.where(inside, chosen, self.chosen),
            squares,
        )

    @property
    def normalizer(self) -> Tensor:
        """Logarithm of the sum of `exp(logit)`."""
        return self.largest + self.total.log()


class _Slopes(NamedTuple):
    """The inputs of the gradient with respect to the logits, `[N]` each."""

    by_log_prob: Tensor
    """Gradient with respect to the log-probability, times the head's factor."""
    by_entropy: Tensor | None
    """The same for the entropy; None: the loss does not contain it."""
    normalizer: Tensor
    entropy: Tensor

    def by_logits(self, logits: Tensor, rows: slice, target: Tensor, memory: Tensor) -> Tensor:
        """Return a block's gradient, from `d log p_t / dz = 1_t - p`, `dH / dz = -p (log p + H)`.

        The block of logits is overwritten.
        """
        by_log_prob = self.by_log_prob[rows, None]
        log_p = logits.sub_(self.normalizer[rows, None])
        if self.by_entropy is None:
            grad = log_p.exp_().mul_(-by_log_prob)
        else:
            grad = torch.exp(log_p, out=memory)
            log_p.add_(self.entropy[rows, None]).mul_(self.by_entropy[rows, None])
            grad.mul_(log_p.add_(by_log_prob).neg_())
        inside, column = _locate(target, logits.shape[1])
        own = torch.where(inside[:, None], by_log_prob, 0.0)
        return grad.scatter_add_(1, column[:, None], own)


class _Grid(NamedTuple):
    """The blocks of N rows times V columns of logits."""

    rows: list[slice]
    columns: list[slice]
    block_size: int

    @classmethod
    def of(cls, num_rows: int, num_columns: int, max_size: int) -> "_Grid":
        """Make square blocks, or longer ones if there are few rows or columns."""
        side = isqrt(max_size)
        width = min(num_columns, max(1, side, max_size // max(1, num_rows)))
        # The dummy micro-batch of a rank has no row.
        height = max(1, min(num_rows, max_size // width))
        return cls(_slices(num_rows, height), _slices(num_columns, width), height * width)

    def allocate(self, like: Tensor) -> Tensor:
        """Allocate two blocks, `[2, block_size]`, that are used for all blocks.

        The allocator would return large blocks to the system and fault them in again page by page,
        which takes as long as the arithmetic.
        """
        return like.new_empty(2, self.block_size)


def _views(memory: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Return two blocks of one shape in `memory`."""
    shape = rows.stop - rows.start, columns.stop - columns.start
    first, second = memory[:, : shape[0] * shape[1]].view(2, *shape)
    return first, second


class _BlockedHead(torch.autograd.Function):
    """The head, the temperature and the softmax, block by block, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: HeadTransform,
        temperature: float,
        block_bytes: int,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        head = _Head(weight, bias, transform, temperature)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        entropy, normalizer = torch.empty_like(log_probs), torch.empty_like(log_probs)
        squares = torch.empty_like(log_probs) if with_squares else None
        grid = _Grid.of(len(targets), len(weight), block_bytes // dtype.itemsize)
        memory = grid.allocate(log_probs)
        for rows in grid.rows:
            seen = _Softmax.empty(log_probs[rows], with_squares=with_squares)
            for columns in grid.columns:
                first, second = _views(memory, rows, columns)
                logits = head.logits(hidden[rows], columns, first)
                seen = seen.update(logits, targets[rows] - columns.start, second)
            normalizer[rows] = seen.normalizer
            log_probs[rows] = seen.chosen - normalizer[rows]
            entropy[rows] = normalizer[rows] - seen.weighted / seen.total
            if squares is not None and seen.squares is not None:
                squares[rows] = seen.squares / seen.total.square()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.transform, ctx.temperature, ctx.grid = transform, temperature, grid
        ctx.set_materialize_grads(False)
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - of the decorator's type
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        head = _Head(weight, bias, ctx.transform, ctx.temperature)
        by_log_prob, by_entropy = (None if g is None else g * head.factor for g in grads[:2])
        if by_log_prob is None:
            by_log_prob = torch.zeros_like(normalizer)
        slopes = _Slopes(by_log_prob, by_entropy, normalizer, entropy)
        grad_hidden = torch.zeros_like(hidden, dtype=normalizer.dtype)
        # A frozen head has no gradient.
        grad_weight, grad_bias = (
            torch.zeros_like(one, dtype=normalizer.dtype) if is_needed else None
            for one, is_needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        memory = ctx.grid.allocate(normalizer)
        for rows in ctx.grid.rows:
            for columns in ctx.grid.columns:
                first, second = _views(memory, rows, columns)
                logits = head.logits(hidden[rows], columns, first)
                slope = head.slope(logits)
                grad = slopes.by_logits(logits, rows, targets[rows] - columns.start, second)
                grad = (grad if slope is None else grad.mul_(slope)).to(weight.dtype)
                grad_hidden[rows] += grad @ weight[columns]
                if grad_weight is not None:
                    grad_weight[columns] += grad.T @ hidden[rows]
                if grad_bias is not None:
                    grad_bias[columns] += grad.sum(dim=0)
                # Otherwise they would be in memory together with those of the next block.
                del slope, grad
        return (
            grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None, None, None,
        )  # fmt: skip


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _locate(target: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return which rows have their target in a block, and a valid column for every row."""
    return (target >= 0) & (target < width), target.clamp(0, width - 1)
