"""What training reads of a DataProto, as typed records, and how its rows become mini-batches.

This is the border: behind it there are no string keys.
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
    """float32, of the frozen reference; None where no KL term needs it."""
    rollout_is_weights: Tensor | None
    """float32, importance weights of the rollout's correction; None where there is none."""
    row_weights: Tensor | None
    """`[B]` float64, the share of its trajectory that each row is; None: each is a whole one."""
    uids: tuple[Hashable, ...]
    """`[B]`: the group of each row."""
    places: tuple[int, ...]
    """`[B]`: where the row's prompt stands in the batch of all ranks; where nobody knows, the how
    manyeth of this rank's groups it is of."""
    request_ids: tuple[str, ...]
    """`[B]`: which request each row was; its position where nobody knows."""

    @property
    def response_mask(self) -> Tensor:
        """`[B, T]`, 1 on trained tokens."""
        return self.padded.response_mask


def read_padded_rows(batch: DataProto) -> PaddedRows:
    """Read what log-probabilities are computed from."""
    return PaddedRows(
        input_ids=_tensor(batch, "input_ids"),
        attention_mask=_tensor(batch, "attention_mask"),
        response_mask=_tensor(batch, "response_mask"),
    )


def read_update_rows(batch: DataProto, *, with_reference: bool) -> UpdateRows:
    """Read what an update is computed from.

    Args:
        batch: Rows with advantages.
        with_reference: Whether `ref_log_prob` is needed.

    Raises:
        DataError: naming the first key that is missing.
    """
    padded = read_padded_rows(batch)
    count = len(padded.input_ids)
    uids = tuple(batch.non_tensor_batch.get("uid", np.arange(count)).tolist())
    request_ids = batch.non_tensor_batch.get("request_id", np.arange(count))
    return UpdateRows(
        padded=padded,
        old_log_probs=_tensor(batch, "old_log_probs"),
        advantages=_tensor(batch, "advantages"),
        ref_log_prob=_tensor(batch, "ref_log_prob") if with_reference else None,
        rollout_is_weights=_optional(batch, "rollout_is_weights"),
        row_weights=_row_weights(batch, padded.response_mask),
        uids=uids,
        places=_places(batch, uids),
        request_ids=tuple(str(name) for name in request_ids.tolist()),
    )


class SampleAt(NamedTuple):
    """One sample of a batch, before it is made."""

    place: int
    """Of its prompt in the batch of all ranks."""
    offset: int
    """Of the sample in its group."""


def deal_samples(
    num_prompts: int, samples_each: int, groups_per_batch: int | None, num_ranks: int
) -> list[list[SampleAt]]:
    """Deal the samples of a batch to the ranks.

    Within each mini-batch the prompts that divide evenly are dealt whole and in turn: the samples
    of a prompt share the prefix that an engine caches. Those left over are split, each rank's part
    of them in one piece, so that every rank has work in every mini-batch and no two differ by more
    than one sample of the batch.

    Args:
        num_prompts: Of the batch, over all ranks.
        samples_each: Of one prompt.
        groups_per_batch: Prompts of one mini-batch over all ranks; None: all of them.
        num_ranks: Ranks.

    Returns:
        The samples of each rank, in the order of the batch.

    Example:
        >>> [len(dealt) for dealt in deal_samples(1, 8, None, 2)]
        [4, 4]
    """
    dealt: list[list[SampleAt]] = [[] for _ in range(num_ranks)]
    size = groups_per_batch or max(num_prompts, 1)
    turn = 0
    for start in range(0, num_prompts, size):
        places = range(start, min(start + size, num_prompts))
        num_whole = len(places) // num_ranks * num_ranks
        for place in places[:num_whole]:
            rank = (place - start) % num_ranks
            dealt[rank] += [SampleAt(place, offset) for offset in range(samples_each)]
        left = [SampleAt(*at) for at in product(places[num_whole:], range(samples_each))]
        turn = _deal_in_pieces(left, dealt, turn)
    return dealt


def _deal_in_pieces(left: Sequence[SampleAt], dealt: list[list[SampleAt]], turn: int) -> int:
    """Deal each rank one piece; the ranks from `turn` on get one more. Returns whose turn is next.

    The order of a group's samples is that of the ranks which have them.
    """
    each, more = divmod(len(left), len(dealt))
    start = 0
    for rank, own in enumerate(dealt):
        end = start + each + ((rank - turn) % len(dealt) < more)
        own += left[start:end]
        start = end
    return (turn + more) % len(dealt)


def split_mini_batches(
    rows: UpdateRows, groups_per_batch: int | None, world: World, shuffle_seed: Sequence[int]
) -> list[list[int]]:
    """Deal this rank's rows to mini-batches that count prompts, a prompt's rows together.

    The groups are taken in the order of the batch, and may be spread over ranks. A collective.

    Args:
        rows: This rank's.
        groups_per_batch: Prompts of one mini-batch over all ranks; None: all of them.
        world: The ranks.
        shuffle_seed: Entropy of a random order of the groups; empty: their own order.

    Returns:
        This rank's rows of each mini-batch; as many lists on every rank.
    """
    mine = list(dict.fromkeys(zip(rows.places, rows.uids, strict=True)))
    in_order = sorted(world.gather_flat(mine), key=lambda group: group[0])
    order = list(dict.fromkeys(uid for _, uid in in_order))
    if shuffle_seed:
        permutation = np.random.default_rng(list(shuffle_seed)).permutation(len(order))
        order = [order[place] for place in permutation]
    size = groups_per_batch or max(1, len(order))
    batch_of = {uid: place // size for place, uid in enumerate(order)}
    batches: list[list[int]] = [[] for _ in range(-(-len(order) // size))]
    for row, uid in enumerate(rows.uids):
        batches[batch_of[uid]].append(row)
    return batches


def split_micro_batches(
    rows: PaddedRows, index: Sequence[int], budget: int, world: World
) -> list[PackedBatch]:
    """Pack rows into micro-batches of at most `budget` tokens, as many on every rank.

    Rows that train on nothing are left out; a rank with too few gets dummies. A collective.
    """
    lengths = count_tokens(rows)
    index = [row for row in index if lengths[row] > 0]
    mine = [lengths[row] for row in index]
    count = int(world.max([count_micro_batches(mine, budget)])[0])
    return [
        pack_rows(rows, [index[place] for place in part], world.device)
        if part
        else dummy_batch(rows.response_mask.shape[1], world.device)
        for part in partition_balanced(mine, count)
    ]


def _row_weights(batch: DataProto, mask: Tensor) -> Tensor | None:
    """Weights by the column `trajectory_ids` `[B]`, where rows are parts of trajectories."""
    trajectory_ids = _optional(batch, "trajectory_ids")
    return None if trajectory_ids is None else compute_row_weights(mask, trajectory_ids)


def _places(batch: DataProto, uids: Sequence[Hashable]) -> tuple[int, ...]:
    known = _optional(batch, "batch_data_id")
    if known is not None:
        return tuple(known.tolist())
    number = {uid: place for place, uid in enumerate(dict.fromkeys(uids))}
    return tuple(number[uid] for uid in uids)


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
