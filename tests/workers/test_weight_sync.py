"""New weights to engines that fail, on one rank and on two."""

import asyncio
import json
from typing import Any

import pytest
import torch

from agentrl.config.schema.training import FsdpConfig
from agentrl.errors import EngineError
from agentrl.workers.distributed import World
from agentrl.workers.model import PolicyModel
from agentrl.workers.vision_tower import freeze_tower
from agentrl.workers.weight_sync import sync_weights
from tests.fakes.engines import tiny_model
from tests.fakes.torchrun import ranks_of
from tests.fakes.training import make_policy
from tests.fakes.vision_models import make_vision_model
from tests.fakes.weight_sync_ranks import FailingEngine

NUM_BYTES = sum(p.nbytes for p in tiny_model().parameters())
Outcomes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What two ranks said, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    with ranks_of("tests.fakes.weight_sync_ranks", str(folder)) as ranks:
        ends = [rank.wait() for rank in ranks]
    assert [end.code for end in ends] == [0, 0], "\n".join(end.err for end in ends)
    return [json.loads((folder / f"outcomes_{rank}.json").read_text()) for rank in range(2)]


def engine(taker: FailingEngine) -> Any:
    return taker


async def test_sync_that_fails_is_repeated_whole_and_says_how_often(world: World):
    taker = FailingEngine(num_failures=2)
    result = await sync_weights(make_policy(world), engine(taker), version=3, max_attempts=3)
    assert (result.num_attempts, result.num_bytes, taker.version) == (3, NUM_BYTES, 3)
    assert result.seconds > 0


async def test_sync_that_fails_to_the_last_attempt_raises_what_the_engine_said(world: World):
    taker = FailingEngine(num_failures=9)
    with pytest.raises(EngineError, match="full at update 2"):
        await sync_weights(make_policy(world), engine(taker), version=3, max_attempts=2)
    assert (taker.num_updates, taker.version) == (2, -1)


async def test_cancelled_sync_is_not_repeated(world: World):
    class Hanging(FailingEngine):
        async def update_weights(self, named_tensors: Any, *, version: int) -> Any:
            self.num_updates += 1
            await asyncio.Event().wait()

    taker = Hanging()
    syncing = sync_weights(make_policy(world), engine(taker), version=3, max_attempts=3)
    task = asyncio.create_task(syncing)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert taker.num_updates == 1


async def test_weights_come_in_what_the_layers_compute_in(world: World):
    policy = PolicyModel(tiny_model(), world, torch.bfloat16, FsdpConfig())
    taker = FailingEngine()
    await sync_weights(policy, engine(taker), version=1)
    assert {tensor.dtype for tensor in taker.taken.values()} == {torch.bfloat16}
    assert all(weight.dtype == torch.float32 for _, weight in policy.named_weights())


@pytest.mark.parametrize(
    ("is_trained", "loads_tower", "is_sent"),
    [(False, True, False), (True, True, True), (False, False, True)],
)
async def test_tower_is_sent_unless_it_is_frozen_and_the_engine_has_it(
    world: World, is_trained: bool, loads_tower: bool, is_sent: bool
):
    lm = make_vision_model("qwen2_5_vl")
    if not is_trained:
        freeze_tower(lm)
    policy, taker = PolicyModel(lm, world, torch.float32, FsdpConfig()), FailingEngine()
    taker.loads_tower = loads_tower
    await sync_weights(policy, engine(taker), version=1)
    of_tower = {name for name, _ in policy.named_weights() if ".visual." in name}
    assert of_tower
    expected = {name for name, _ in policy.named_weights() if is_sent or name not in of_tower}
    assert set(taker.taken) == expected


@pytest.mark.slow
def test_sync_that_fails_on_one_rank_is_repeated_on_both(outcomes: Outcomes):
    for rank in (0, 1):
        mended = outcomes[rank]["mended"]
        assert mended["error"] is None
        assert (mended["attempts"], mended["updates"], mended["version"]) == (2, 2, 7)
        assert mended["is_whole"]


@pytest.mark.slow
def test_sync_that_is_given_up_raises_on_both_ranks_and_neither_waits_for_the_other(
    outcomes: Outcomes,
):
    main, other = (outcomes[rank]["given up"] for rank in (0, 1))
    assert main["error"] == "RankError: rank 1 failed: EngineError: full at update 2"
    assert other["error"] == "EngineError: full at update 2"
    assert main["updates"] == other["updates"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("case", "attempts"), [("shared", 1), ("shared, mended", 2)])
def test_engine_that_all_ranks_share_is_sent_to_by_the_main_one_alone(
    outcomes: Outcomes, case: str, attempts: int
):
    main, other = (outcomes[rank][case] for rank in (0, 1))
    assert main["error"] is other["error"] is None
    assert (main["updates"], other["updates"]) == (attempts, 0)
    assert main["version"] == other["version"] == 7, "the other one hears of it"
    assert main["is_whole"], "gathered with the other's shards"
    assert (main["bytes"], other["bytes"]) == (NUM_BYTES, 0)
    assert main["attempts"] == other["attempts"] == attempts
