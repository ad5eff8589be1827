"""Credit: corrections, KL in the reward, advantages, rejection; on one rank and on two."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.algorithms import columns_read, register_adv_est
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.trainer.credit import Credit
from agentrl.training.distributed import World, start_world, stop_world
from agentrl.training.whole_batch import gather_batch
from tests.fakes_credit import ADAPTIVE, run, scored_batch
from tests.fakes_torchrun import ranks_of


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


def credited(world: World, **keys: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What credit makes of `scored_batch`."""
    batch = scored_batch()
    figures = Credit(AlgorithmConfig.model_validate(keys), world).compute(batch)
    return dict(batch.batch.items()), figures


@pytest.fixture
def world() -> Iterator[World]:
    yield start_world("cpu", timeout_s=60)
    stop_world()


# Columns.


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


# KL in the reward.


def test_kl_is_taken_off_the_scores_of_trained_tokens(world: World):
    plain, _ = credited(world)
    found, figures = credited(
        world, adv_estimator="by_turn", use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.5}
    )
    mask = plain["response_mask"].bool()
    kl = torch.where(mask, plain["old_log_probs"] - plain["ref_log_prob"], 0.0)
    torch.testing.assert_close(found["token_level_rewards"], plain["token_level_scores"] - 0.5 * kl)
    rows = mask.any(-1)
    mean = (kl.sum(-1) / mask.sum(-1).clamp(min=1))[rows].mean()
    assert figures["actor/reward_kl_penalty"] == pytest.approx(mean.item(), abs=1e-6)
    assert figures["actor/reward_kl_penalty_coeff"] == 0.5


def test_law_9_a_kl_does_not_make_equal_scores_differ(world: World):
    found, _ = credited(world, use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.5})
    plain, _ = credited(world)
    group_b = torch.tensor([1, 5])
    assert not found["advantages"][group_b].any()
    assert torch.equal(found["token_level_rewards"][group_b], plain["token_level_scores"][group_b])
    assert not torch.equal(found["advantages"][0], plain["advantages"][0]), "group a feels the KL"


def test_the_reference_s_estimator_trains_equal_scores_on_the_kl(world: World):
    found, _ = credited(
        world, adv_estimator="grpo_verl", use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.5}
    )
    assert found["advantages"][torch.tensor([1, 5])].any()


def test_the_weight_of_the_kl_moves_once_the_batch_has_been_trained_on(world: World):
    config = AlgorithmConfig.model_validate({"use_kl_in_reward": True, "kl_ctrl": ADAPTIVE})
    credit = Credit(config, world)
    figures = credit.compute(scored_batch())
    credit.compute(scored_batch())
    assert credit.kl_ctrl.value == 0.1, "two batches were looked at, none was trained on"
    credit.commit()
    error = max(-0.2, min(0.2, figures["actor/reward_kl_penalty"] / 0.01 - 1))
    assert error != 0
    assert credit.kl_ctrl.value == pytest.approx(0.1 * (1 + error * 6 / 100))
    moved = credit.kl_ctrl.value
    credit.commit()
    assert credit.kl_ctrl.value == moved, "a batch counts once"
    again = Credit(config, world)
    again.load_state_dict(json.loads(json.dumps(credit.state_dict())))
    assert again.kl_ctrl.value == moved


def test_a_fixed_weight_is_the_configuration_s_whatever_a_checkpoint_says(world: World):
    credit = Credit(AlgorithmConfig.model_validate({"kl_ctrl": {"kl_coef": 0.3}}), world)
    credit.load_state_dict({"kl_coef": 7.0})
    assert credit.kl_ctrl.value == 0.3
    credit.load_state_dict({})


# Rollout correction.


def test_without_a_correction_there_are_figures_and_nothing_else(world: World):
    found, figures = credited(world)
    assert figures["rollout_corr/kl"] != 0
    assert not {"rollout_is_weights", "rejected"} & found.keys()
    assert torch.equal(found["response_mask"], scored_batch().batch["response_mask"])


def test_weights_are_a_column_of_the_batch(world: World):
    found, figures = credited(world, rollout_correction={"preset": "decoupled_token_is"})
    mask = found["response_mask"].bool()
    ratio = (found["old_log_probs"] - found["rollout_log_probs"]).exp().clamp(max=2.0)
    torch.testing.assert_close(found["rollout_is_weights"], torch.where(mask, ratio, 0.0))
    assert 0 < figures["rollout_corr/rollout_is_eff_sample_size"] < 1


def test_what_is_rejected_is_scored_and_not_trained(world: World):
    plain, _ = credited(world)
    found, figures = credited(
        world, rollout_correction={"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.3"}
    )
    before, after = plain["response_mask"].bool(), found["response_mask"].bool()
    assert found["response_mask"].dtype == plain["response_mask"].dtype
    assert (before & ~after).any()
    assert not (after & ~before).any()
    assert torch.equal(found["rejected"], before & ~after)
    expected = torch.where(after, plain["advantages"], 0.0)
    assert torch.equal(found["advantages"], expected), "the group's baseline has all samples"
    share = (before & ~after).sum() / before.sum()
    assert figures["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share.item())


def test_a_sequence_that_is_rejected_trains_on_nothing(world: World):
    found, figures = credited(
        world, rollout_correction={"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.06}
    )
    rejected = found["rejected"].any(-1)
    assert rejected.any()
    assert not rejected.all()
    assert not found["response_mask"][rejected].any()
    assert not found["advantages"][rejected].any()
    assert figures["rollout_corr/rollout_rs_rejected_sequences"] == rejected.sum()


def test_bypass_leaves_weights_and_rejection_to_the_loss(world: World):
    found, figures = credited(world, rollout_correction={"preset": "bypass_pg_geo_rs_seq_tis"})
    assert figures == {}
    assert not {"rollout_is_weights", "rejected"} & found.keys()


@pytest.mark.slow
def test_law_10_two_ranks_give_the_credit_of_one(world: World, tmp_path: Path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    with ranks_of("tests.fakes_credit", str(together)) as ranks:
        run(world, alone)
        told = [rank.wait() for rank in ranks]
    assert [rank.code for rank in told] == [0, 0], "\n".join(rank.err for rank in told)
    expected = load_file(alone / "tensors_0.safetensors")
    found = [load_file(together / f"tensors_{rank}.safetensors") for rank in (0, 1)]
    assert not found[0].keys() & found[1].keys()
    both = found[0] | found[1]
    assert both.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(both[name], values, rtol=1e-6, atol=1e-7, msg=name)
    figures = [json.loads((together / f"figures_{rank}.json").read_text()) for rank in (0, 1)]
    assert figures[0] == figures[1], "the weight of the KL is the same on every rank"
    for name, values in json.loads((alone / "figures_0.json").read_text()).items():
        assert figures[0][name] == pytest.approx(values, rel=1e-6, abs=1e-9)
