"""Typed records of the columns that training reads from a DataProto, and mini-batches of its rows.

Modules of this package that use these records need no string keys.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.aggregation import compute_row_weights
from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.workers.distributed import World
from agentrl.workers.packing import (
    PackedBatch,
    PaddedRows,
    count_micro_batches,
    count_tokens,
    dummy_batch,
    pack_rows,
    partition_balanced,
)


@dataclass(frozen=True, slots=True)
class UpdateRows:
    """The rows of one update, `[B, T]` each unless said otherwise."""

    padded: PaddedRows
    old_log_probs: Tensor
    """float32, of the policy before the update."""
    advantages: Tensor
    """float32."""
    ref_log_prob: Tensor | None
    """float32, of the frozen reference; None if no KL term needs it."""
    rollout_is_weights: Tensor | None
    """float32, importance weights of the rollout's correction; None: no correction."""
    row_weights: Tensor | None
    """`[B]` float64, each row's share of its trajectory's tokens; None: 1 each."""
    uids: tuple[Hashable, ...]
    """`[B]`: the group of each row."""
    prompt_indices: tuple[int, ...]
    """`[B]`: index of the row's prompt in the global batch; if unknown, the index of its group on
    this rank."""
    request_ids: tuple[str, ...]
    """`[B]`: the request of each row; if unknown, the row's index."""

    @property
    def response_mask(self) -> Tensor:
        """`[B, T]`, 1 on trained tokens."""
        return self.padded.response_mask


def read_padded_rows(batch: DataProto) -> PaddedRows:
    """Read the columns that log-probabilities are computed from."""
    return PaddedRows(
        input_ids=_tensor(batch, "input_ids"),
        attention_mask=_tensor(batch, "attention_mask"),
        response_mask=_tensor(batch, "response_mask"),
    )


def read_update_rows(batch: DataProto, *, with_reference: bool) -> UpdateRows:
    """Read the columns that an update is computed from.

    Args:
        batch: Rows with advantages.
        with_reference: Whether `ref_log_prob` is needed.

    Raises:
        DataError: for the first missing key.
    """
    padded = read_padded_rows(batch)
    mask, trajectories = padded.response_mask, _optional(batch, "trajectory_ids")
    count = len(padded.input_ids)
    uids = tuple(batch.non_tensor_batch.get("uid", np.arange(count)).tolist())
    request_ids = batch.non_tensor_batch.get("request_id", np.arange(count))
    known = _optional(batch, "batch_data_id")
    number = {uid: index for index, uid in enumerate(dict.fromkeys(uids))}
    prompt_indices = [number[uid] for uid in uids] if known is None else known.tolist()
    return UpdateRows(
        padded=padded,
        old_log_probs=_tensor(batch, "old_log_probs"),
        advantages=_tensor(batch, "advantages"),
        ref_log_prob=_tensor(batch, "ref_log_prob") if with_reference else None,
        rollout_is_weights=_optional(batch, "rollout_is_weights"),
        row_weights=None if trajectories is None else compute_row_weights(mask, trajectories),
        uids=uids,
        prompt_indices=tuple(prompt_indices),
        request_ids=tuple(str(name) for name in request_ids.tolist()),
    )


class SampleIndex(NamedTuple):
    """One sample of a batch, before it is made."""

    prompt_index: int
    """In the global batch."""
    offset: int
    """Index of the sample in its group."""


def shard_samples(
    num_prompts: int, samples_each: int, groups_per_batch: int | None, num_ranks: int
) -> list[list[SampleIndex]]:
    """Assign the samples of a batch to the ranks.

    Within each mini-batch, prompts that divide evenly are assigned whole and in turn: the samples
    of a prompt share a prefix that the engine caches. The samples of the remaining prompts are
    split, one contiguous piece per rank. So every rank has work in every mini-batch, and the
    numbers of samples of two ranks differ by at most one over the whole batch.

    Args:
        num_prompts: Of the batch, over all ranks.
        samples_each: Of one prompt.
        groups_per_batch: Prompts of one mini-batch over all ranks; None: all of them.
        num_ranks: Ranks.

    Returns:
        The samples of each rank, in the order of the batch.

    Example:
        >>> [len(shard) for shard in shard_samples(1, 8, None, 2)]
        [4, 4]
    """
    shards: list[list[SampleIndex]] = [[] for _ in range(num_ranks)]
    size = groups_per_batch or max(num_prompts, 1)
    first_rank = 0
    for start in range(0, num_prompts, size):
        prompts = range(start, min(start + size, num_prompts))
        num_whole = len(prompts) // num_ranks * num_ranks
        for prompt in prompts[:num_whole]:
            rank = (prompt - start) % num_ranks
            shards[rank] += [SampleIndex(prompt, offset) for offset in range(samples_each)]
        rest = [SampleIndex(*pair) for pair in product(prompts[num_whole:], range(samples_each))]
        first_rank = _assign_pieces(rest, shards, first_rank)
    return shards


def _assign_pieces(
    samples: Sequence[SampleIndex], shards: list[list[SampleIndex]], first_rank: int
) -> int:
    """Assign each rank one piece; ranks from `first_rank` on get one sample more.

    The order of a group's samples is that of their ranks. Returns the next `first_rank`.
    """
    each, more = divmod(len(samples), len(shards))
    start = 0
    for rank, shard in enumerate(shards):
        end = start + each + ((rank - first_rank) % len(shards) < more)
        shard += samples[start:end]
        start = end
    return (first_rank + more) % len(shards)


def split_mini_batches(
    rows: UpdateRows, groups_per_batch: int | None, world: World, shuffle_seed: Sequence[int]
) -> list[list[int]]:
    """Split this rank's rows into mini-batches that count prompts; a prompt's rows stay together.

    The groups have the order of the batch, and may have rows on several ranks. A collective.

    Args:
        rows: This rank's.
        groups_per_batch: Prompts of one mini-batch over all ranks; None: all of them.
        world: The ranks.
        shuffle_seed: Seed of a random order of the groups; empty: their own order.

    Returns:
        This rank's rows of each mini-batch; the same number of lists on every rank.
    """
    mine = list(dict.fromkeys(zip(rows.prompt_indices, rows.uids, strict=True)))
    in_order = sorted(world.gather_flat(mine), key=lambda group: group[0])
    order = list(dict.fromkeys(uid for _, uid in in_order))
    if shuffle_seed:
        permutation = np.random.default_rng(list(shuffle_seed)).permutation(len(order))
        order = [order[index] for index in permutation]
    size = groups_per_batch or max(1, len(order))
    batch_of = {uid: index // size for index, uid in enumerate(order)}
    batches: list[list[int]] = [[] for _ in range(-(-len(order) // size))]
    for row, uid in enumerate(rows.uids):
        batches[batch_of[uid]].append(row)
    return batches


def split_micro_batches(
    rows: PaddedRows, index: Sequence[int], budget: int, world: World
) -> list[PackedBatch]:
    """Pack rows into micro-batches of at most `budget` tokens, the same number on every rank.

    Rows without a trained token are left out. A rank with fewer micro-batches gets dummies. A
    collective.
    """
    lengths = count_tokens(rows)
    index = [row for row in index if lengths[row] > 0]
    mine = [lengths[row] for row in index]
    count = int(world.max([count_micro_batches(mine, budget)])[0])
    return [
        pack_rows(rows, [index[item] for item in part], world.device)
        if part
        else dummy_batch(rows.response_mask.shape[1], world.device)
        for part in partition_balanced(mine, count)
    ]


def _tensor(batch: DataProto, key: str) -> Tensor:
    found = _optional(batch, key)
    if found is None:
        raise DataError(f"the batch has no {key!r}", expected="a batch that went through collate")
    return found


def _optional(batch: DataProto, key: str) -> Tensor | None:
    found = None if batch.batch is None else batch.batch.get(key, None)
    if found is None:
        return None
    return found.float() if torch.is_floating_point(found) else found
