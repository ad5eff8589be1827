"""Which columns an estimator reads, and whole batches made of the ranks' rows."""

from typing import Any

import pytest
import torch

from agentrl.algorithms import columns_read, register_adv_est
from agentrl.config.schema import AlgorithmConfig
from agentrl.protocol import DataProto
from agentrl.trainer.credit import compute_batch_advantage
from agentrl.training.distributed import World, start_world, stop_world
from agentrl.training.whole_batch import gather_batch


@register_adv_est("by_turn")
def by_turn(token_level_rewards: Any, response_mask: Any, turn_ids: Any, gamma: float) -> Any:
    return token_level_rewards, token_level_rewards


@register_adv_est("by_whatever_there_is")
def by_whatever_there_is(**everything: Any) -> Any:
    return everything["token_level_rewards"], everything["token_level_rewards"]


def scored(*keys: str) -> DataProto:
    names = ("response_mask", "token_level_scores", "in_baseline", "turn_ids", "input_ids", *keys)
    tensors = {name: torch.ones(2, 3) for name in names}
    tensors["batch_data_id"] = torch.tensor([1, 0])
    return DataProto.from_dict(tensors, {"uid": ["a", "b"], "messages": [[], []]})


def test_an_estimator_is_sent_what_it_names_and_no_more():
    config = AlgorithmConfig(adv_estimator="grpo")
    assert columns_read(scored(), config) == (
        ["response_mask", "token_level_scores", "in_baseline"],
        ["uid"],
    )
    rewarded = columns_read(scored("token_level_rewards"), config)
    assert rewarded == (["response_mask", "in_baseline", "token_level_rewards"], ["uid"])
    by_turns = columns_read(scored(), AlgorithmConfig(adv_estimator="by_turn"))
    assert by_turns == (["response_mask", "token_level_scores", "turn_ids"], [])


def test_an_estimator_that_takes_everything_is_sent_everything():
    batch = scored()
    names = columns_read(batch, AlgorithmConfig(adv_estimator="by_whatever_there_is"))
    assert set(names.tensors) == set(batch.batch.keys())
    assert names.objects == ["uid", "messages"]


@pytest.fixture
def world() -> Any:
    yield start_world("cpu", timeout_s=60)
    stop_world()


def test_a_whole_batch_has_the_order_of_its_prompts(world: World):
    whole = gather_batch(scored(), ["turn_ids"], ["uid", "ability"], world)
    assert whole.data.non_tensor_batch["uid"].tolist() == ["b", "a"]
    assert whole.data.non_tensor_batch["ability"].tolist() == [None, None]
    assert whole.own.tolist() == [1, 0]


def test_one_rank_computes_its_own_batch(world: World):
    batch = scored()
    compute_batch_advantage(batch, AlgorithmConfig(adv_estimator="by_turn"), world)
    assert torch.equal(batch.batch["advantages"], torch.ones(2, 3))
