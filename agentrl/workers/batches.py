"""Typed records of the columns that training reads from a DataProto, and mini-batches of its rows.

Modules of this package that use these records need no string keys.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.aggregation import compute_row_weights
from agentrl.algorithms.trajectories import TRAJECTORY_IDS
from agentrl.errors import DataError
from agentrl.media.inputs import MultiModalInputs
from agentrl.media.processor import MediaEncoder
from agentrl.media.records import MediaSpan
from agentrl.protocol import DataProto
from agentrl.workers.distributed import World
from agentrl.workers.packing import (
    PackedBatch,
    PaddedRows,
    RowPacker,
    count_micro_batches,
    dummy_batch,
    partition_balanced,
)
from agentrl.workers.row_exchange import RowExchange

CPU_MICRO_BATCH_TOKENS = 2048
"""More tokens are not faster on a CPU, and activations of this number stay small. If rows share
prefixes, micro-batches have twice as many: fewer prefixes are then computed several times."""
DEVICE_MICRO_BATCH_TOKENS = 16384
"""Matrix products of this number of tokens run at full speed on an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRows:
    """The rows of one update, with the columns that every update reads."""

    padded: PaddedRows
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

    def has_split_trajectory(self) -> bool:
        """Whether several rows of a trajectory have trained tokens."""
        weights = self.row_weights
        return weights is not None and bool(((weights > 0) & (weights < 1)).any())

    def move(self, exchange: RowExchange) -> Self:
        """Return the rows that this rank computes. A collective."""
        if not exchange.is_needed:
            return self
        keys = exchange.world.gather_flat(
            zip(self.uids, self.prompt_indices, self.request_ids, strict=True)
        )
        computed = [keys[row] for row in exchange.computed]
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: exchange.send(column)
            for name, column in columns.items()
            if isinstance(column, Tensor)
        }
        return replace(
            self,
            **moved,
            padded=move_padded_rows(self.padded, exchange),
            uids=tuple(uid for uid, _, _ in computed),
            prompt_indices=tuple(index for _, index, _ in computed),
            request_ids=tuple(name for _, _, name in computed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRows(UpdateRows):
    """The rows of an update of the policy, `[B, T]` float32 each."""

    old_log_probs: Tensor | None
    """Of the policy before the update; None: those of the update's own forward pass, which are the
    same in the first optimizer step of a batch."""
    advantages: Tensor
    ref_log_prob: Tensor | None
    """Of the frozen reference; None if no KL term needs it."""
    rollout_is_weights: Tensor | None
    """Importance weights of the rollout's correction; None: no correction."""

    @classmethod
    def read(cls, batch: DataProto, *, with_reference: bool) -> Self:
        """Read the columns of a batch with advantages.

        Args:
            batch: The rows.
            with_reference: Whether `ref_log_prob` is needed.

        Raises:
            DataError: for the first missing column.
        """
        return cls(
            **read_shared_columns(batch),
            old_log_probs=_optional(batch, "old_log_probs"),
            advantages=_tensor(batch, "advantages"),
            ref_log_prob=_tensor(batch, "ref_log_prob") if with_reference else None,
            rollout_is_weights=_optional(batch, "rollout_is_weights"),
        )

    def find_signal(self) -> list[bool]:
        """Return for each row whether a trained token has an advantage."""
        return (self.advantages.ne(0) & self.response_mask.ne(0)).any(dim=1).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRows(UpdateRows):
    """The rows of an update of the critic, `[B, T]` float32 each."""

    values: Tensor
    """Of the critic before the update."""
    returns: Tensor
    """What the critic learns."""

    @classmethod
    def read(cls, batch: DataProto) -> Self:
        """Read the columns of a batch with values and returns.

        Raises:
            DataError: for the first missing column.
        """
        return cls(
            **read_shared_columns(batch),
            values=_tensor(batch, "values"),
            returns=_tensor(batch, "returns"),
        )


def move_padded_rows(rows: PaddedRows, exchange: RowExchange) -> PaddedRows:
    """Return the rows that this rank computes. A collective."""
    return PaddedRows(
        input_ids=exchange.send(rows.input_ids),
        attention_mask=exchange.send(rows.attention_mask),
        response_mask=exchange.send(rows.response_mask),
        media=None if rows.media is None else tuple(exchange.send_objects(rows.media)),
    )


def read_padded_rows(batch: DataProto) -> PaddedRows:
    """Read the columns that log-probabilities are computed from."""
    media = batch.non_tensor_batch.get("multi_modal_inputs")
    return PaddedRows(
        input_ids=_tensor(batch, "input_ids"),
        attention_mask=_tensor(batch, "attention_mask"),
        response_mask=_tensor(batch, "response_mask"),
        media=None if media is None else tuple(map(_read_spans, media)),
    )


def _read_spans(inputs: Any) -> tuple[MediaSpan, ...]:
    if not isinstance(inputs, MultiModalInputs):
        raise DataError(
            f"'multi_modal_inputs' has a {type(inputs).__name__}",
            expected="a MultiModalInputs in each row, as collate makes them",
        )
    return inputs.spans


def read_groups(batch: DataProto) -> tuple[Hashable, ...]:
    """Read the group of each row; if unknown, each row is a group."""
    count = 0 if batch.batch is None else len(batch.batch)
    return tuple(batch.non_tensor_batch.get("uid", np.arange(count)).tolist())


def read_shared_columns(batch: DataProto) -> dict[str, Any]:
    """Read the fields of `UpdateRows`.

    Raises:
        DataError: for the first missing column.
    """
    padded = read_padded_rows(batch)
    mask, trajectories = padded.response_mask, _optional(batch, TRAJECTORY_IDS)
    count = len(padded.input_ids)
    uids = read_groups(batch)
    request_ids = batch.non_tensor_batch.get("request_id", np.arange(count))
    known = _optional(batch, "batch_data_id")
    number = {uid: index for index, uid in enumerate(dict.fromkeys(uids))}
    prompt_indices = [number[uid] for uid in uids] if known is None else known.tolist()
    return {
        "padded": padded,
        "row_weights": None if trajectories is None else compute_row_weights(mask, trajectories),
        "uids": uids,
        "prompt_indices": tuple(prompt_indices),
        "request_ids": tuple(str(name) for name in request_ids.tolist()),
    }


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
    rows: PaddedRows,
    index: Sequence[int],
    budget: int | None,
    world: World,
    *,
    max_sharing_length: int = 0,
) -> list[PackedBatch]:
    """Pack rows into micro-batches of at most `budget` tokens a rank, as many on every rank.

    Rows without a trained token are left out. A prefix that rows of a micro-batch share is packed
    once; such rows stay together if they fit into the budget. A rank with fewer micro-batches gets
    dummies. A collective.

    Args:
        rows: This rank's, on the CPU.
        index: The rows to pack.
        budget: Tokens of each rank that computes a micro-batch, shared ones counted once; a longer
            row is alone. The placeholder tokens of a picture are counted, and not the patches that
            the vision tower computes for them. None: a default for the device.
        world: The ranks.
        max_sharing_length: Rows of at most this many tokens share prefixes; 0: none does.
    """
    packer = RowPacker(rows, index, max_sharing_length=max_sharing_length)
    if budget is None:
        on_cpu = world.device.type == "cpu"
        budget = CPU_MICRO_BATCH_TOKENS if on_cpu else DEVICE_MICRO_BATCH_TOKENS
        budget *= 2 if on_cpu and packer.shares else 1
    budget *= world.ranks_per_sequence
    runs, costs = packer.cut(budget)
    count = int(world.max([count_micro_batches(costs, budget)])[0])
    encoder = None if rows.media is None or world.is_alone else _find_encoder(rows, index, world)
    return [
        replace(packer.pack([runs[item] for item in part], world.device), encoder=encoder)
        if part
        else dummy_batch(rows.response_mask.shape[1], world.device, encoder=encoder)
        for part in partition_balanced(costs, count)
    ]


def _find_encoder(rows: PaddedRows, index: Sequence[int], world: World) -> MediaEncoder | None:
    """Return the encoder of a picture of any rank; None if no rank has one. A collective."""
    spans = (span for row in index for span in (rows.media or ())[row])
    own = next((span.item.encoder for span in spans), None)
    return next((found for found in world.gather(own) if found is not None), None)


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
