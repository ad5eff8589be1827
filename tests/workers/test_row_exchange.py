import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workers.distributed import World
from agentrl.workers.packing import partition_balanced
from agentrl.workers.row_exchange import assign_rows, plan_exchange
from tests.fakes.row_exchange_ranks import LENGTHS, MINI_BATCHES
from tests.fakes.torchrun import ranks_of


def loads(lengths: Sequence[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[row] for row in part) for part in parts]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from("abcd")), max_size=30),
    st.integers(1, 5),
)
def test_each_row_is_assigned_once_and_parts_are_balanced(
    rows: list[tuple[int, str]], num_parts: int
):
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    parts = assign_rows(lengths, groups, num_parts)
    assert len(parts) == num_parts
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    best = max(loads(lengths, partition_balanced(lengths, num_parts)))
    assert max(loads(lengths, parts)) <= 1.05 * best


def test_samples_of_a_group_stay_together_if_the_balance_allows_it():
    lengths = [10, 11, 9, 10] * 4
    groups = list("abcd" * 4)
    parts = assign_rows(lengths, groups, 2)
    assert [{groups[row] for row in part} for part in parts] == [{"a", "b"}, {"c", "d"}]
    uneven = assign_rows([5, 5, 1, 1], list("aabb"), 2)
    assert loads([5, 5, 1, 1], uneven) == [6, 6], "balance comes first"


def test_one_rank_keeps_its_rows(world: World):
    exchange = plan_exchange(world, [3, 0, 5], ["a", "a", "b"], [[0, 1], [2]])
    assert not exchange.is_needed
    assert exchange.computed == (0, 1, 2)
    assert exchange.mini_batches == [[0, 1], [2]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks computed and got back."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    with ranks_of("tests.fakes.row_exchange_ranks", str(folder), size=4) as ranks:
        ended = [rank.wait() for rank in ranks]
    assert not any(rank.code for rank in ended), "\n".join(rank.err for rank in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "copies"), [("single", 1), ("paired", 2)])
def test_rows_move_to_the_ranks_that_compute_them_and_results_to_their_owners(
    seen: list[dict[str, Any]], form: str, copies: int
):
    found = [rank[form] for rank in seen]
    for first in range(0, 4, copies):
        assert all(found[first]["computed"] == other["computed"]
                   for other in found[first : first + copies])  # fmt: skip
    leaders = found[::copies]
    names = [100 * rank + row for rank, rows in enumerate(LENGTHS) for row in range(len(rows))]
    assert sorted(name for rank in leaders for name in rank["computed"]) == names
    computer = {name: rank for rank in range(0, 4, copies) for name in found[rank]["computed"]}
    for rank, lengths in enumerate(LENGTHS):
        own = [100 * rank + row for row in range(len(lengths))]
        assert found[rank]["results"] == [[2 * name, computer[name]] for name in own]
        assert found[rank]["bits"] == [True] * len(found[rank]["computed"])
    for number in range(2):
        batch = [name for rank in leaders for name in rank["mini_batches"][number]]
        owned = [100 * rank + row for rank in range(4) for row in MINI_BATCHES[rank][number]]
        assert sorted(batch) == sorted(owned)
        tokens = {name: LENGTHS[name // 100][name % 100] for name in batch}
        parts = [sum(tokens[name] for name in rank["mini_batches"][number]) for rank in leaders]
        owners = [
            sum(LENGTHS[rank][row] for row in MINI_BATCHES[rank][number]) for rank in range(4)
        ]
        assert max(parts) <= max(owners)
