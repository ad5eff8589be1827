"""Log-probabilities and entropy of trained tokens, without the logits of a whole micro-batch.

`log_softmax(logits / T)` over the full vocabulary, T the rollout's temperature. The head runs on
the trained positions alone and in blocks of positions times vocabulary. The forward pass keeps a
running softmax over a row's blocks, the backward pass makes each block again, so at no moment does
more than one block of logits exist, however many tokens or words there are.

On a CPU a block that stays in the cache is what makes this fast: with 151,669 words, 1,024 trained
tokens and hidden size 64, both passes took half of the time that full logits take, and a quarter of
that of chunks of 1,024 whole rows. Few whole rows at a time would stay in the cache as well, but
read the head's weight once for each of them.

Shape key: N trained positions, H hidden, V vocabulary; n, v: those of one block.
"""

from math import inf, isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

CPU_BLOCK_BYTES = 2 * 2**20
"""A block stays in the cache between the passes over it."""
DEVICE_BLOCK_BYTES = 256 * 2**20
"""A block is large enough for matrix products at full speed."""


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
    sum_pi_squared: Tensor | None = None
    """float32: sum over the vocabulary of the squared probabilities, without gradient; None where
    nobody asked for it."""


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
    block_bytes: int | None = None,
    with_sum_pi_squared: bool = False,
) -> TokenScores:
    """Score each target under the distribution that the head makes of its hidden state.

    Args:
        hidden: `[N, H]`, what the decoder's body gave at the position before each target.
        weight: `[V, H]`, the head.
        bias: `[V]`, or None.
        targets: `[N]`, int64.
        temperature: The rollout's.
        transform: What the model does behind its head.
        block_bytes: Bytes of one block of logits in float32, of which two exist at once; half a
            block more for 16-bit weights, and one for the backward pass of a soft cap. None: what
            suits the device.
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
    """What makes logits of hidden states."""

    weight: Tensor
    bias: Tensor | None
    transform: HeadTransform
    temperature: float

    @property
    def factor(self) -> float:
        """The slope of the logits by the product with the weight, where there is no cap."""
        return self.transform.scale / self.temperature

    def logits(self, hidden: Tensor, columns: slice, memory: Tensor) -> Tensor:
        """Make one block `[n, v]`, divided by the temperature, in `memory` where its dtype fits."""
        out = memory if memory.dtype == hidden.dtype else None
        product = torch.mm(hidden, self.weight[columns].T, out=out)
        if self.bias is not None:
            product += self.bias[columns]
        # In the same room, not beside it: of the product only its own narrow block is new then.
        logits = product if out is memory else memory.copy_(product)
        cap = self.transform.cap
        if cap is None:
            return logits if self.factor == 1.0 else logits.mul_(self.factor)
        return logits.mul_(self.transform.scale / cap).tanh_().mul_(cap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Give what the cap adds to `factor`, as a factor; None without a cap."""
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
    """Sum of `exp(logit - largest) ** 2`; None: not asked for."""

    @classmethod
    def empty(cls, like: Tensor, *, with_squares: bool) -> "_Softmax":
        """Start before the first column; `like` is `[n]`."""
        zeros = torch.zeros_like(like)
        squares = zeros if with_squares else None
        return cls(torch.full_like(like, -inf), zeros, zeros, zeros, squares)

    def see(self, logits: Tensor, place: Tensor, memory: Tensor) -> "_Softmax":
        """Take in a block `[n, v]`; the target is its column `place` where it has one."""
        largest = torch.maximum(self.largest, logits.amax(dim=1))
        shrink = (self.largest - largest).exp()
        mass = torch.sub(logits, largest[:, None], out=memory).exp_()
        inside, column = _locate(place, logits.shape[1])
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
    """What the gradient by the logits is made of, `[N]` each."""

    by_log_prob: Tensor
    """Gradient by the log-probability, times the head's factor."""
    by_entropy: Tensor | None
    """Gradient by the entropy, likewise; None: the loss does not contain it."""
    normalizer: Tensor
    entropy: Tensor

    def by_logits(self, logits: Tensor, rows: slice, place: Tensor, memory: Tensor) -> Tensor:
        """Give a block's gradient, from `d log p_t / dz = 1_t - p`, `dH / dz = -p (log p + H)`.

        The block of logits is used up.
        """
        by_log_prob = self.by_log_prob[rows, None]
        log_p = logits.sub_(self.normalizer[rows, None])
        if self.by_entropy is None:
            grad = log_p.exp_().mul_(-by_log_prob)
        else:
            grad = torch.exp(log_p, out=memory)
            log_p.add_(self.entropy[rows, None]).mul_(self.by_entropy[rows, None])
            grad.mul_(log_p.add_(by_log_prob).neg_())
        inside, column = _locate(place, logits.shape[1])
        own = torch.where(inside[:, None], by_log_prob, 0.0)
        return grad.scatter_add_(1, column[:, None], own)


class _Memory(NamedTuple):
    """Room for two blocks, used over and over.

    Large blocks from the allocator would be given back to the system and faulted in page by page
    each time, which takes as long as the arithmetic.
    """

    cells: Tensor
    """`[2, cells]`."""

    def views(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Shape it for one block."""
        shape = rows.stop - rows.start, columns.stop - columns.start
        first, second = self.cells[:, : shape[0] * shape[1]].view(2, *shape)
        return first, second


class _Grid(NamedTuple):
    """How N rows times V columns of logits are cut into blocks."""

    num_rows: int
    num_columns: int
    block_rows: int
    block_columns: int

    @classmethod
    def of(cls, num_rows: int, num_columns: int, cells: int) -> "_Grid":
        """Make blocks of at most `cells`: square, or longer where there are fewer of the other."""
        side = isqrt(cells)
        width = min(num_columns, max(1, side, cells // max(1, num_rows)))
        # A rank's dummy micro-batch has no row.
        height = max(1, min(num_rows, cells // width))
        return cls(num_rows, num_columns, height, width)

    def allocate(self, like: Tensor) -> "_Memory":
        """Make room for two blocks."""
        return _Memory(like.new_empty(2, self.block_rows * self.block_columns))

    def rows(self) -> list[slice]:
        """Give the blocks' rows."""
        return _slices(self.num_rows, self.block_rows)

    def columns(self) -> list[slice]:
        """Give the blocks' columns."""
        return _slices(self.num_columns, self.block_columns)


class _BlockedHead(torch.autograd.Function):
    """The head, the temperature and the softmax in one, block by block in both directions."""

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
        for rows in grid.rows():
            seen = _Softmax.empty(log_probs[rows], with_squares=with_squares)
            for columns in grid.columns():
                first, second = memory.views(rows, columns)
                logits = head.logits(hidden[rows], columns, first)
                seen = seen.see(logits, targets[rows] - columns.start, second)
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
        grad_weight = torch.zeros_like(weight, dtype=normalizer.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=normalizer.dtype)
        memory = ctx.grid.allocate(normalizer)
        for rows in ctx.grid.rows():
            for columns in ctx.grid.columns():
                first, second = memory.views(rows, columns)
                logits = head.logits(hidden[rows], columns, first)
                slope = head.slope(logits)
                grad = slopes.by_logits(logits, rows, targets[rows] - columns.start, second)
                grad = (grad if slope is None else grad.mul_(slope)).to(weight.dtype)
                grad_hidden[rows] += grad @ weight[columns]
                grad_weight[columns] += grad.T @ hidden[rows]
                if grad_bias is not None:
                    grad_bias[columns] += grad.sum(dim=0)
                # Or they would live on beside those of the next block.
                del slope, grad
        return (
            grad_hidden.to(hidden.dtype),
            grad_weight.to(weight.dtype),
            None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None, None, None,
        )  # fmt: skip


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _locate(place: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Say which rows have their target in a block, and a column to look at in any case."""
    return (place >= 0) & (place < width), place.clamp(0, width - 1)
