from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.workers.packing import partition_balanced

few_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=7)
lengths_and_groups = st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abcdef")), max_size=20)


def loads(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[item] for item in part) for part in parts]


def best_largest(lengths: list[int], num_parts: int, *, most: int | None = None) -> int:
    """The smallest largest sum over every way to deal, of which none deals a part over `most`."""
    best = sum(lengths)
    for places in product(range(num_parts), repeat=len(lengths)):
        parts = [
            [item for item, at in enumerate(places) if at == part] for part in range(num_parts)
        ]
        if most is None or all(most - 1 <= len(part) <= most for part in parts):
            best = min(best, max(loads(lengths, parts)))
    return best


@settings(max_examples=40, deadline=None)
@given(lengths_and_groups, st.integers(1, 6), st.booleans())
def test_every_item_is_dealt_once_and_groups_stay_whole(drawn, num_parts: int, equal_counts: bool):
    lengths, groups = [length for length, _ in drawn], [group for _, group in drawn]
    for given_groups in (None, groups):
        parts = partition_balanced(
            lengths, num_parts, groups=given_groups, equal_counts=equal_counts
        )
        assert len(parts) == num_parts
        assert sorted(item for part in parts for item in part) == list(range(len(lengths)))
    owners = {(groups[item], place) for place, part in enumerate(parts) for item in part}
    assert len(owners) == len(set(groups)), "no group lies in two parts"


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


@settings(max_examples=40, deadline=None)
@given(few_lengths, st.integers(1, 3))
def test_equal_counts_differ_by_one_at_most(lengths: list[int], num_parts: int):
    parts = partition_balanced(lengths, num_parts, equal_counts=True)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    # The largest may be twice the best among partitions of equal counts, and no more.
    most = -(-len(lengths) // num_parts)
    assert max(loads(lengths, parts)) <= 2 * best_largest(lengths, num_parts, most=most)


def test_equal_counts_cost_balance():
    lengths = [9, 1, 1, 1]
    assert loads(lengths, partition_balanced(lengths, 2)) == [9, 3]
    assert loads(lengths, partition_balanced(lengths, 2, equal_counts=True)) == [10, 2]


def test_equal_counts_count_groups_where_there_are_any():
    parts = partition_balanced([1, 1, 1, 9], 2, groups=["a", "a", "a", "b"], equal_counts=True)
    assert sorted(parts) == [[0, 1, 2], [3]]


def test_equal_lengths_are_dealt_in_their_order():
    assert partition_balanced([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]
    assert partition_balanced([], 2) == [[], []]


def test_groups_name_every_item():
    with pytest.raises(ValueError, match="argument 2"):
        partition_balanced([1, 2], 1, groups=["a"])
