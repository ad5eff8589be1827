"""How the samples of a batch are shards to ranks, and the rows of a rank to mini-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workers.batches import (
    PolicyRows,
    SampleIndex,
    read_padded_rows,
    shard_samples,
    split_micro_batches,
    split_mini_batches,
)
from agentrl.workers.distributed import World
from tests.fakes.training import Row, make_batch


@dataclass
class KnownWorld:
    """One rank of several: the items of all ranks are known beforehand."""

    others: list[Any]

    def gather_flat(self, _: Sequence[Any]) -> list[Any]:
        return self.others


def rows_of(uids: Sequence[str], places: Sequence[int] | None = None) -> PolicyRows:
    batch = make_batch([Row([1], [2], [1], uid) for uid in uids])
    if places is not None:
        batch.batch["batch_data_id"] = torch.tensor(places)
    return PolicyRows.read(batch, with_reference=False)


def test_mini_batches_count_prompts_and_keep_groups_whole(world: World):
    rows = rows_of(["a", "a", "a", "b", "c", "c", "d"])
    assert split_mini_batches(rows, 2, world, []) == [[0, 1, 2, 3], [4, 5, 6]]
    assert split_mini_batches(rows, None, world, []) == [list(range(7))]
    assert split_mini_batches(rows, 3, world, []) == [[0, 1, 2, 3, 4, 5], [6]]


def test_scattered_members_of_a_group_come_together(world: World):
    assert split_mini_batches(rows_of(list("abab")), 1, world, []) == [[0, 2], [1, 3]]


def test_order_of_the_batch_decides_where_the_rows_say_it(world: World):
    rows = rows_of(list("cab"), [2, 0, 1])
    assert split_mini_batches(rows, 2, world, []) == [[1, 2], [0]]


def test_shuffled_mini_batches_depend_on_the_seed_alone(world: World):
    rows = rows_of([f"g{n // 2}" for n in range(20)])
    first = split_mini_batches(rows, 3, world, [7, 0, 0])
    assert first == split_mini_batches(rows, 3, world, [7, 0, 0])
    assert first != split_mini_batches(rows, 3, world, [7, 1, 0])
    assert sorted(row for batch in first for row in batch) == list(range(20))


def test_whole_groups_are_shards_in_turn_and_what_is_left_is_split():
    shards = shard_samples(5, 2, None, 2)
    assert [[at.prompt_index for at in own] for own in shards] == [[0, 0, 2, 2, 4], [1, 1, 3, 3, 4]]
    assert [own[-1] for own in shards] == [SampleIndex(4, 0), SampleIndex(4, 1)]


def test_fewer_samples_than_ranks_leave_ranks_without_work():
    assert [len(own) for own in shard_samples(1, 2, None, 4)] == [1, 1, 0, 0]
    assert shard_samples(0, 8, None, 2) == [[], []]


@given(
    num_prompts=st.integers(0, 12),
    samples_each=st.integers(1, 5),
    size=st.none() | st.integers(1, 12),
    num_ranks=st.integers(1, 7),
)
def test_every_sample_is_shards_once_and_evenly(num_prompts, samples_each, size, num_ranks):
    shards = shard_samples(num_prompts, samples_each, size, num_ranks)
    everything = list(product(range(num_prompts), range(samples_each)))
    assert sorted(at for own in shards for at in own) == everything
    assert all(own == sorted(own) for own in shards), "a rank's rows are in the batch's order"
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    # Rank by rank and then by place is the order of the batch: what `gather_batch` relies on.
    by_rank = [at for own in shards for at in own]
    assert sorted(by_rank, key=lambda at: at.prompt_index) == everything


@given(
    num_batches=st.integers(1, 3),
    size=st.integers(1, 5),
    samples_each=st.integers(1, 3),
    num_ranks=st.integers(1, 4),
)
def test_layout_is_invisible_mini_batches_of_several_ranks_are_those_of_one(
    num_batches, size, samples_each, num_ranks
):
    num_prompts = num_batches * size
    shards = shard_samples(num_prompts, samples_each, size, num_ranks)
    world = KnownWorld([(at.prompt_index, f"g{at.prompt_index}") for own in shards for at in own])
    found: list[set[SampleIndex]] = [set() for _ in range(num_batches)]
    for own in filter(None, shards):
        rows = rows_of([f"g{at.prompt_index}" for at in own], [at.prompt_index for at in own])
        for batch, index in zip(found, split_mini_batches(rows, size, world, []), strict=True):
            batch.update(own[row] for row in index)
    whole = list(product(range(num_prompts), range(samples_each)))
    per_batch = size * samples_each
    assert [sorted(batch) for batch in found] == [
        whole[start : start + per_batch] for start in range(0, len(whole), per_batch)
    ]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_mini_batch_gives_every_rank_work(num_ranks):
    for own in shard_samples(4, 4, 1, num_ranks):
        assert {at.prompt_index for at in own} == {0, 1, 2, 3}


def test_micro_batches_without_a_budget_suit_a_cpu_and_the_longest_row(world: World):
    sizes = [3000, *[700] * 5]
    rows = make_batch([Row([1], [2] * size, [1] * size, "a") for size in sizes])
    packed = split_micro_batches(read_padded_rows(rows), range(len(sizes)), None, world)
    assert sorted(one.input_ids.numel() for one in packed) == [700, 1400, 1400, 3000]


class Group:
    """Two ranks that compute the same rows together, of which this one is the first."""

    def size(self) -> int:
        return 2


def test_ranks_that_compute_rows_together_share_the_budget_of_each(world: World):
    rows = make_batch([Row([1], [n] * 500, [1] * 500) for n in range(8)])
    group: Any = Group()
    packed = split_micro_batches(
        read_padded_rows(rows), range(8), 1000, replace(world, sequence_group=group)
    )
    assert [one.input_ids.numel() for one in packed] == [2000, 2000]


def test_micro_batches_without_a_budget_are_larger_if_rows_share_a_prompt(world: World):
    rows = make_batch([Row([*range(9)] * 60, [n] * 500, [1] * 500) for n in range(8)])
    packed = split_micro_batches(
        read_padded_rows(rows), range(8), None, world, max_sharing_length=9999
    )
    assert [one.input_ids.numel() for one in packed] == [540 + 7 * 499, 540 + 499]
    apart = split_micro_batches(read_padded_rows(rows), range(8), None, world)
    assert max(one.input_ids.numel() for one in apart) <= 2048
