"""Credit: what it reads, and the credit of one rank on two."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.algorithms import (
    adv_estimator_names,
    columns_read,
    get_adv_estimator_fn,
    register_adv_est,
)
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.trainer.credit import Credit, gather_batch
from agentrl.workers.distributed import World, start_world, stop_world
from tests.fakes.scored_batch import credit_on_two_threads, credit_rows, run
from tests.fakes.torchrun import ranks_of

BUNDLED = [
    name
    for name in adv_estimator_names()
    if get_adv_estimator_fn(name).__module__.startswith("agentrl.")
]


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


@pytest.fixture
def world() -> Iterator[World]:
    yield start_world("cpu", timeout_s=60)
    stop_world()


# What an estimator is sent.


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


def test_a_whole_batch_has_the_order_of_its_prompts(world: World):
    whole = gather_batch(scored(), ["turn_ids"], ["uid", "ability"], world)
    assert whole.data.non_tensor_batch["uid"].tolist() == ["b", "a"]
    assert whole.data.non_tensor_batch["ability"].tolist() == [None, None]
    assert whole.own.tolist() == [1, 0]


def test_one_rank_computes_its_own_batch(world: World):
    batch = scored()
    Credit(AlgorithmConfig(adv_estimator="by_turn"), world).compute(batch)
    assert torch.equal(batch.batch["advantages"], torch.ones(2, 3))


def test_a_batch_without_tensors_is_refused(world: World):
    with pytest.raises(DataError, match="without tensors"):
        Credit(AlgorithmConfig(), world).compute(DataProto.from_dict(non_tensors={"uid": ["a"]}))


# Two ranks.


@pytest.mark.parametrize("name", BUNDLED)
def test_layout_is_invisible_each_estimator_gives_two_ranks_the_credit_of_one(
    world: World, name: str
):
    keys = {"adv_estimator": name, "gamma": 0.9, "lam": 0.8, "use_kl_in_reward": name != "maxrl",
            "gdpo_reward_keys": ["style", "length"]}  # fmt: skip
    expected, metrics = credit_rows(world, keys)
    (first, figures), (second, same) = credit_on_two_threads(world, keys)
    assert not first.keys() & second.keys()
    assert (first | second).keys() == expected.keys()
    for key, values in (first | second).items():
        torch.testing.assert_close(values, expected[key], rtol=1e-5, atol=1e-6, msg=key)
    assert any(values.any() for key, values in expected.items() if key.startswith("advantages"))
    assert figures == same == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.slow
def test_layout_is_invisible_two_ranks_give_the_credit_of_one(world: World, tmp_path: Path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    with ranks_of("tests.fakes.scored_batch", str(together)) as ranks:
        run(world, alone)
        outputs = [rank.wait() for rank in ranks]
    assert [rank.code for rank in outputs] == [0, 0], "\n".join(rank.err for rank in outputs)
    expected = load_file(alone / "tensors_0.safetensors")
    found = [load_file(together / f"tensors_{rank}.safetensors") for rank in (0, 1)]
    assert not found[0].keys() & found[1].keys()
    both = found[0] | found[1]
    assert both.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(both[name], values, rtol=1e-6, atol=1e-7, msg=name)
    metrics = [json.loads((together / f"figures_{rank}.json").read_text()) for rank in (0, 1)]
    assert metrics[0] == metrics[1], "the weight of the KL is the same on every rank"
    for name, values in json.loads((alone / "figures_0.json").read_text()).items():
        assert metrics[0][name] == pytest.approx(values, rel=1e-6, abs=1e-9)
