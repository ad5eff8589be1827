"""Rows with a common beginning: the tree of prefixes, and how it is cut into micro-batches."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workers.prefixes import MIN_SHARED_TOKENS, SortedRows, sort_rows

BEGIN = list(range(MIN_SHARED_TOKENS))


@st.composite
def rows_of_tokens(draw: st.DrawFn) -> list[list[int]]:
    """Rows of few different tokens, many of which continue an earlier row or a part of it."""
    some = st.lists(st.integers(0, 2), min_size=1, max_size=2 * MIN_SHARED_TOKENS)
    rows = [draw(some)]
    for _ in range(draw(st.integers(0, 8))):
        known = draw(st.sampled_from(rows))
        kept = draw(st.integers(0, len(known)))
        rows.append(known[:kept] + draw(some | (st.just([]) if kept else some)))
    return rows


def sort(rows: list[list[int]], max_length: int = 1000) -> SortedRows:
    return sort_rows([np.array(row) for row in rows], max_length=max_length)


def rows_in(found: SortedRows, rows: list[list[int]]) -> list[list[int]]:
    """Put every row together from its segments, whose tokens are those of their first row."""
    segments, built = found.segments(), [[] for _ in rows]
    for number, segment in enumerate(segments):
        assert segment.parent < number
        above = segments[segment.parent] if segment.parent >= 0 else None
        assert (above.end if above else 0) == segment.start < segment.end
        if above:
            assert above.first <= segment.first < segment.last <= above.last
        source = rows[found.order[segment.first]][segment.start : segment.end]
        for place in range(segment.first, segment.last):
            built[found.order[place]] += source
    return built


@given(rows_of_tokens(), st.integers(0, 60))
def test_segments_of_a_row_are_the_row_and_every_token_is_counted_once(rows, max_length):
    found = sort(rows, max_length)
    assert sorted(found.order) == list(range(len(rows)))
    assert rows_in(found, rows) == rows
    tokens = sum(segment.end - segment.start for segment in found.segments())
    assert tokens == found.cost(0, len(rows)) <= sum(map(len, rows))


@given(rows_of_tokens(), st.integers(1, 120), st.data())
def test_runs_hold_every_row_once_within_the_budget(rows, budget, data):
    found = sort(rows)
    runs = found.cut(budget)
    assert [row for run in runs for row in run] == list(range(len(rows)))
    assert all(len(run) == 1 or found.cost(run.start, run.stop) <= budget for run in runs)
    taken = [run for run in runs if data.draw(st.booleans())]
    if taken:
        part = found.take(taken)
        kept = [rows[row] for row in part.order]
        assert rows_in(part._replace(order=list(range(len(kept)))), kept) == kept


def test_rows_of_a_group_share_their_prompt_once():
    found = sort([[*BEGIN, 50, 51], [9, 9], [*BEGIN, 60], [*BEGIN, 50, 52]])
    assert [found.order[place] for place in range(4)] == [0, 3, 2, 1]
    lengths = [segment.end - segment.start for segment in found.segments()]
    assert lengths == [len(BEGIN), 2, 2, 1, 2], "one token `50` is too short to be shared"
    assert [segment.parent for segment in found.segments()] == [-1, 0, 0, 0, -1]


def test_a_second_level_of_the_tree_is_shared_too():
    longer = [*BEGIN, *(100 + token for token in BEGIN)]
    found = sort([[*longer, 1], [*longer, 2], [*BEGIN, 300]])
    assert [segment.parent for segment in found.segments()] == [-1, 0, 1, 1, 0]


def test_rows_longer_than_the_window_share_nothing():
    rows = [[*BEGIN, 1], [*BEGIN, 2], [*BEGIN, 3, 4]]
    assert sort(rows, len(BEGIN) + 1).cost(0, 3) == len(BEGIN) + 2 + len(rows[2])
    assert sort(rows, 0).cost(0, 3) == sum(map(len, rows))


def test_group_that_fits_into_the_budget_stays_together():
    groups = [
        [[*(1000 * group + token for token in BEGIN), n] for n in range(4)] for group in (1, 2)
    ]
    found = sort([row for pair in zip(*groups, strict=True) for row in pair])
    assert found.cut(len(BEGIN) + 4) == [range(4), range(4, 8)]
    assert found.cut(len(BEGIN) + 2) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
