import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.order import DataOrder, epoch_order
from agentrl.errors import DataError

SEEDS = st.integers(-(2**70), 2**70)


@given(st.integers(0, 200), SEEDS, st.integers(0, 10_000), st.booleans())
def test_an_epoch_has_every_row_once_and_is_a_function_of_its_seed(rows, seed, epoch, shuffle):
    order = epoch_order(rows, seed=seed, epoch=epoch, shuffle=shuffle)
    assert sorted(order) == list(range(rows))
    assert order == epoch_order(rows, seed=seed, epoch=epoch, shuffle=shuffle)


def test_the_order_is_the_one_that_it_has_always_been():
    assert epoch_order(8, seed=3, epoch=1, shuffle=True) == [2, 1, 4, 0, 5, 7, 6, 3]


def test_epochs_and_seeds_differ():
    orders = [epoch_order(50, seed=s, epoch=e, shuffle=True) for s in (0, 1) for e in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_without_shuffling_rows_come_as_they_are():
    order = DataOrder(5, seed=0, shuffle=False)
    assert [order.next_batch(2) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert (order.epoch, order.position, order.num_batches(2)) == (1, 2, 2)


@given(st.integers(1, 40), SEEDS, st.data())
def test_every_batch_is_full_and_no_row_comes_twice_in_an_epoch(rows, seed, data):
    size = data.draw(st.integers(1, rows))
    order = DataOrder(rows, seed=seed)
    for epoch in range(3):
        batches = [order.next_batch(size) for _ in range(order.num_batches(size))]
        seen = [row for batch in batches for row in batch]
        assert order.epoch == epoch
        assert all(len(batch) == size for batch in batches)
        assert len(set(seen)) == len(seen) == rows // size * size


@given(
    st.integers(4, 30),
    SEEDS,
    st.booleans(),
    st.lists(st.integers(1, 4), max_size=20),
    st.lists(st.integers(1, 4), min_size=1, max_size=20),
)
def test_resume_is_exact_a_restored_order_goes_on_as_if_it_had_never_stopped(
    rows, seed, shuffle, before, after
):
    order = DataOrder(rows, seed=seed, shuffle=shuffle, fingerprint="data")
    for size in before:
        order.next_batch(size)
    saved = json.loads(json.dumps(order.state_dict()))
    resumed = DataOrder(rows, seed=seed, shuffle=shuffle, fingerprint="data")
    resumed.load_state_dict(saved)
    assert [order.next_batch(s) for s in after] == [resumed.next_batch(s) for s in after]


@pytest.mark.parametrize(
    "other",
    [
        DataOrder(6, seed=0, fingerprint="a"),
        DataOrder(5, seed=1, fingerprint="a"),
        DataOrder(5, seed=0, shuffle=False, fingerprint="a"),
        DataOrder(5, seed=0, fingerprint="b"),
    ],
)
def test_a_state_of_other_data_is_refused_and_changes_nothing(other):
    order = DataOrder(5, seed=0, fingerprint="a")
    order.next_batch(2)
    other.next_batch(1)
    with pytest.raises(DataError, match="this run"):
        order.load_state_dict(other.state_dict())
    assert (order.epoch, order.position) == (0, 2)


def test_a_batch_larger_than_the_data_is_an_error():
    with pytest.raises(DataError, match="8 prompts from 5 rows") as caught:
        DataOrder(5, seed=0).next_batch(8)
    assert "at most 5" in str(caught.value)
