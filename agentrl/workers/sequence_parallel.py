"""Ulysses sequence parallelism: a group of ranks computes one micro-batch together.

Each rank of the group holds an equal, contiguous part of the packed tokens. Only attention needs
all of them: before it, each rank sends the others its tokens of their heads, and after it the
result returns the same way. So a sequence may be longer than one device can hold.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.

Shape key: P ranks of the group, S packed tokens, s = ceil(S / P), H heads, D head size, N trained
positions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from agentrl.engines.attention_shape import AttentionShape
from agentrl.errors import ConfigError


def check_heads(config: PretrainedConfig, num_ranks: int, *, section: str = "actor") -> None:
    """Refuse a model with heads that a group of ranks cannot divide.

    Args:
        config: The model's.
        num_ranks: P.
        section: The section of the run file that has its keys.

    Raises:
        ConfigError: with the numbers that can be used.
    """
    shapes = AttentionShape.of_layers(config)
    heads, key_heads, _ = shapes[0]
    usable = [
        size
        for size in range(1, heads + 1)
        if all(
            own % size == 0 and (keys % size == 0 or size % keys == 0) for own, keys, _ in shapes
        )
    ]
    if num_ranks not in usable:
        raise ConfigError(
            f"{num_ranks} ranks cannot divide the heads of the model: {heads} of queries, "
            f"{key_heads} of keys",
            key=f"{section}.ulysses_sequence_parallel_size",
            expected=" or ".join(map(str, usable)),
        )


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """One rank's part of the packed tokens of a micro-batch."""

    group: dist.ProcessGroup
    """The ranks that compute the micro-batch together."""
    rank: int
    """Index of this rank in the group."""
    size: int
    """P."""
    num_tokens: int
    """S."""

    @property
    def width(self) -> int:
        """s: the tokens of each rank; the last ranks may have padding."""
        return -(-self.num_tokens // self.size)

    def take(self, tokens: Tensor) -> Tensor:
        """Return this rank's part `[..., s]` of `[..., S]`, padded with zeros."""
        padded = pad(tokens, (0, self.width * self.size - self.num_tokens))
        return padded[..., self.rank * self.width : (self.rank + 1) * self.width]

    def scatter_heads(self, tokens: Tensor) -> Tensor:
        """Exchange this rank's tokens of all heads for all tokens of its heads.

        Key and value heads that are fewer than the ranks are repeated.

        Args:
            tokens: `[s, H, D]`.

        Returns:
            `[S, max(H, P) / P, D]`.
        """
        if (num_heads := tokens.shape[1]) < self.size:
            tokens = tokens.repeat_interleave(self.size // num_heads, dim=1)
        blocks = tokens.unflatten(1, (self.size, -1)).transpose(0, 1)  # [P, s, h, D], by heads
        return _AllToAll.apply(blocks, self.group).flatten(0, 1)[: self.num_tokens]

    def gather_heads(self, tokens: Tensor) -> Tensor:
        """Undo `scatter_heads`: `[S, h, D]` to `[s, h * P, D]`."""
        padded = pad(tokens, (0, 0, 0, 0, 0, self.width * self.size - self.num_tokens))
        blocks = padded.unflatten(0, (self.size, -1))  # [P, s, h, D], by tokens
        return _AllToAll.apply(blocks, self.group).transpose(0, 1).flatten(1, 2)

    def find_own(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Find which of some packed positions, `[N]`, are in this rank's part.

        Returns:
            Their indices in `positions`, `[n]`, and their columns in the part, `[n]`.
        """
        index = (positions // self.width == self.rank).nonzero().flatten()
        return index, positions[index] - self.rank * self.width

    def gather_scores(
        self, own: Iterable[Tensor | None], index: Tensor, num_positions: int
    ) -> list[Tensor]:
        """Give every rank the scores of all positions.

        The gradient is not exchanged: each rank computes the same loss from the same scores, and
        its gradient is that of its own tokens. The sum over the ranks is the gradient of the loss.

        Args:
            own: `[n]` each, of this rank's positions; None is left out.
            index: `[n]`, from `find_own`.
            num_positions: N.

        Returns:
            `[N]` each.
        """
        columns = torch.stack([scores for scores in own if scores is not None])
        gathered = _GatherScores.apply(columns, index, num_positions, self.group)
        return [scores.clone() for scores in gathered]


class _AllToAll(torch.autograd.Function):
    """Send block i to rank i of the group; `[P, ...]` to `[P, ...]`."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(blocks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(grad, ctx.group), None


def _exchange(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = blocks.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _GatherScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, index: Tensor, num_positions: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(index)
        scores = own.new_zeros(len(own), num_positions)
        scores[:, index] = own
        dist.all_reduce(scores, group=group)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        return grad[:, index], None, None, None
