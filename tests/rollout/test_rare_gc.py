"""Rare searches of the garbage collector while requests are in flight."""

import gc

import pytest

from agentrl.rollout.scheduling import GC_THRESHOLD, rare_gc
from tests.fakes.plugins import (
    FakeTool,
    calling,
    make_context,
    make_engine,
    make_manager,
    make_prompts,
)

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def usual_thresholds():
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_only_within_the_block():
    with rare_gc():
        assert gc.get_threshold() == (GC_THRESHOLD, 10, 10)
    assert gc.get_threshold() == USUAL


def test_the_last_of_overlapping_blocks_restores():
    first, second = rare_gc(), rare_gc()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (GC_THRESHOLD, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == USUAL


@pytest.mark.parametrize("own", [(0, 10, 10), (GC_THRESHOLD * 2, 5, 5)])
def test_a_higher_threshold_is_not_changed(own: tuple[int, int, int]):
    gc.set_threshold(*own)
    with rare_gc():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_thresholds_that_the_program_sets_meanwhile_stay():
    with rare_gc():
        gc.set_threshold(1000, 7, 7)
    assert gc.get_threshold() == (1000, 7, 7)


async def test_a_rollout_is_such_a_block():
    seen: list[int] = []

    def note(_: object) -> str:
        seen.append(gc.get_threshold()[0])
        return "found"

    context = make_context(make_engine(calling("lookup", q="a"), "b"), tools=[FakeTool(reply=note)])
    manager = make_manager(context, n=1)
    await manager.rollout(manager.make_requests(make_prompts(1), manager.train_plan()))
    assert seen == [GC_THRESHOLD]
    assert gc.get_threshold() == USUAL
