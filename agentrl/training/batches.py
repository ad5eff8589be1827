"""What training reads of a DataProto, as typed records, and how its rows become mini-batches.

This is the border: behind it there are no string keys.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.training.distributed import World
from agentrl.training.packing import (
    PackedBatch,
    PaddedRows,
    count_micro_batches,
    count_tokens,
    dummy_batch,
    pack_rows,
    split_balanced,
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
    uids: tuple[Hashable, ...]
    """`[B]`: the group of each row."""
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
    uids = batch.non_tensor_batch.get("uid", np.arange(count))
    request_ids = batch.non_tensor_batch.get("request_id", np.arange(count))
    return UpdateRows(
        padded=padded,
        old_log_probs=_tensor(batch, "old_log_probs"),
        advantages=_tensor(batch, "advantages"),
        ref_log_prob=_tensor(batch, "ref_log_prob") if with_reference else None,
        rollout_is_weights=_optional(batch, "rollout_is_weights"),
        uids=tuple(uids.tolist()),
        request_ids=tuple(str(name) for name in request_ids.tolist()),
    )


def split_mini_batches(
    uids: Sequence[Hashable],
    groups_per_batch: int | None,
    world: World,
    shuffle_seed: Sequence[int],
) -> list[list[int]]:
    """Deal this rank's rows to mini-batches that count prompts, a prompt's rows together.

    The groups are taken in turn from the ranks, the first of each, then the second of each: this
    is the order of the whole batch where its prompts were dealt out in turn, and in any case every
    rank has work in every mini-batch. A group may be spread over ranks. A collective.

    Args:
        uids: The group of each of this rank's rows.
        groups_per_batch: Prompts of one mini-batch over all ranks; None: all of them.
        world: The ranks.
        shuffle_seed: Entropy of a random order of the groups; empty: their own order.

    Returns:
        This rank's rows of each mini-batch; as many lists on every rank.
    """
    by_rank = [[(uid,) for uid in rank] for rank in world.gather(list(dict.fromkeys(uids)))]
    in_turn = (found for turn in zip_longest(*by_rank) for found in turn if found is not None)
    order = list(dict.fromkeys(uid for (uid,) in in_turn))
    if shuffle_seed:
        permutation = np.random.default_rng(list(shuffle_seed)).permutation(len(order))
        order = [order[place] for place in permutation]
    size = groups_per_batch or max(1, len(order))
    batch_of = {uid: place // size for place, uid in enumerate(order)}
    batches: list[list[int]] = [[] for _ in range(-(-len(order) // size))]
    for row, uid in enumerate(uids):
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
        for part in split_balanced(mine, count)
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
