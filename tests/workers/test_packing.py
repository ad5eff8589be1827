"""."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.workers.batches import read_padded_rows
from agentrl.workers.packing import (
    PaddedRows,
    count_micro_batches,
    count_tokens,
    dummy_batch,
    pack_rows,
    partition_balanced,
)
from agentrl.workers.prefixes import MIN_SHARED_TOKENS
from tests.fakes.training import Row, make_batch, rows_and_layouts

CPU = torch.device("cpu")


def test_example_of_the_docstring():
    rows = PaddedRows(
        input_ids=torch.tensor([[0, 7, 8, 9, 4, 5, 6, 0]]),
        attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0]]),
        response_mask=torch.tensor([[1, 0, 1, 0, 0]]),
    )
    packed = pack_rows(rows, [0], CPU)
    assert packed.input_ids.tolist() == [[7, 8, 9, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3]]
    assert packed.head_positions.tolist() == [1, 3]
    assert packed.targets.tolist() == [9, 5]
    assert packed.rows.tolist() == [0, 0]
    assert packed.columns.tolist() == [0, 2]
    assert count_tokens(rows) == [4]


@given(rows_and_layouts())
def test_layout_is_invisible_every_trained_token_is_scored_once_after_its_own_prefix(drawn):
    rows, layout = drawn
    padded = read_padded_rows(make_batch(rows, layout))
    ordered = [rows[place] for place in layout.order]
    index = [place for place, count in enumerate(count_tokens(padded)) if count]
    assert index == [place for place, row in enumerate(ordered) if any(row.mask)]
    if not index:
        return
    packed = pack_rows(padded, index, CPU)
    starts = packed.plan.starts
    seen = []
    for position, target, place, column in zip(
        packed.head_positions.tolist(), packed.targets.tolist(),
        packed.rows.tolist(), packed.columns.tolist(), strict=True,
    ):  # fmt: skip
        row = ordered[packed.row_index[place]]
        prefix = packed.input_ids[0, starts[place] : position + 1].tolist()
        assert prefix == row.prompt + row.response[:column]
        assert target == row.response[column]
        seen.append((packed.row_index[place], column))
    expected = {(r, c) for r in index for c, bit in enumerate(ordered[r].mask) if bit}
    assert len(seen) == len(expected)
    assert set(seen) == expected


def test_shared_prefix_is_packed_once_and_scored_for_each_row():
    prompt = list(range(10, 10 + MIN_SHARED_TOKENS))
    rows = [Row(prompt, [1, 2], [1, 1]), Row([5], [6], [1]), Row(prompt, [3, 4, 9], [1, 0, 1])]
    packed = pack_rows(read_padded_rows(make_batch(rows)), [0, 1, 2], CPU, max_sharing_length=99)
    size = len(prompt)
    assert packed.input_ids.tolist() == [[5, *prompt, 1, 3, 4]]
    assert packed.position_ids.tolist() == [[0, *range(size), size, size, size + 1]]
    assert (packed.plan.lengths, packed.plan.parents) == ((1, size, 1, 2), (-1, -1, 1, 1))
    assert packed.row_index == (1, 0, 2)
    # The end of the prompt is scored for both rows.
    assert packed.head_positions.tolist() == [0, size, size, size + 1, size + 3]
    assert packed.targets.tolist() == [6, 1, 3, 2, 9]
    assert packed.rows.tolist() == [0, 1, 2, 1, 2]
    assert packed.columns.tolist() == [0, 0, 0, 1, 2]


def test_tokens_after_the_last_trained_one_are_not_computed():
    rows = read_padded_rows(make_batch([Row([1, 2], [3, 4, 5, 6, 7], [0, 1, 0, 0, 0])]))
    assert pack_rows(rows, [0], CPU).input_ids.tolist() == [[1, 2, 3]]


def test_trained_token_without_a_token_before_it_is_refused():
    rows = PaddedRows(
        input_ids=torch.tensor([[5, 6]]),
        attention_mask=torch.tensor([[1, 1]]),
        response_mask=torch.tensor([[1, 1]]),
    )
    with pytest.raises(DataError, match="no token before it"):
        pack_rows(rows, [0], CPU)


def test_unpack_puts_values_where_they_belong():
    rows = read_padded_rows(make_batch([Row([1], [2, 3, 4], [1, 0, 1])]))
    packed = pack_rows(rows, [0], CPU)
    assert packed.unpack(torch.tensor([0.5, 0.25])).tolist() == [[0.5, 0.0, 0.25]]
    assert dummy_batch(3, CPU).unpack(torch.zeros(0)).shape == (0, 3)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 60))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    count = count_micro_batches(lengths, budget)
    parts = partition_balanced(lengths, count)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[row] for row in part) <= budget
    assert count <= max(1, len(lengths))


def test_row_longer_than_the_budget_is_alone():
    parts = partition_balanced([5, 40, 5], count_micro_batches([5, 40, 5], 10))
    assert [1] in parts


def test_more_micro_batches_than_rows_leave_some_empty():
    assert sorted(map(len, partition_balanced([3, 4], 4))) == [0, 0, 1, 1]


few_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=7)


def loads(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[item] for item in part) for part in parts]


def best_largest(lengths: list[int], num_parts: int) -> int:
    """Return the smallest possible largest sum, over all partitions."""
    best = sum(lengths)
    for owners in product(range(num_parts), repeat=len(lengths)):
        parts = [
            [item for item, owner in enumerate(owners) if owner == part]
            for part in range(num_parts)
        ]
        best = min(best, max(loads(lengths, parts)))
    return best


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 6))
def test_every_item_is_in_one_part(lengths: list[int], num_parts: int):
    parts = partition_balanced(lengths, num_parts)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(len(lengths)))


@settings(max_examples=40, deadline=None)
@given(few_lengths, st.integers(1, 3))
def test_the_largest_part_is_at_most_a_third_over_the_best(lengths: list[int], num_parts: int):
    largest = max(loads(lengths, partition_balanced(lengths, num_parts)))
    bound = 4 / 3 - 1 / (3 * num_parts)
    assert largest <= bound * best_largest(lengths, num_parts) + 1e-9


def test_the_bound_is_met_where_longest_first_is_at_its_worst():
    lengths = [3, 3, 2, 2, 2]
    assert max(loads(lengths, partition_balanced(lengths, 2))) == 7
    assert best_largest(lengths, 2) == 6, "7 is 4/3 - 1/6 of it"


def test_equal_lengths_are_dealt_in_their_order():
    assert partition_balanced([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]
    assert partition_balanced([], 2) == [[], []]
