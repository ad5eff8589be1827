"""Credit: weights of the rollout's correction, and rejection."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agentrl.config.schema.training import AlgorithmConfig
from agentrl.trainer.credit import Credit
from agentrl.workers.distributed import World, start_world, stop_world
from tests.fakes.scored_batch import credited, scored_batch


@pytest.fixture
def world() -> Iterator[World]:
    yield start_world("cpu", timeout_s=60)
    stop_world()


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


REJECTING = {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.06}
KEEPING = REJECTING | {"advantages": "kept"}


def credited_but_for(world: World, row: int, **keys: Any) -> tuple[Any, dict[str, float]]:
    """What credit makes of `scored_batch` where one row alone has strayed from the trainer."""
    batch = scored_batch()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].clone()
    batch.batch["rollout_log_probs"][row] += 1.0
    return batch.batch, Credit(AlgorithmConfig.model_validate(keys), world).compute(batch)


def test_advantages_may_be_those_of_what_is_kept(world: World):
    """Group a scored 1, 0 and 1, and the last of them is rejected."""
    sampled, figures = credited_but_for(world, 6, rollout_correction=REJECTING)
    kept, same = credited_but_for(world, 6, rollout_correction=KEEPING)
    assert figures == same
    for name in ("response_mask", "rejected"):
        assert torch.equal(kept[name], sampled[name])
    assert [round(sampled["advantages"][row, 0].item(), 4) for row in (0, 2, 6)] == [
        0.5773, -1.1547, 0.0,
    ]  # fmt: skip
    assert [round(kept["advantages"][row, 0].item(), 4) for row in (0, 2, 6)] == [
        0.7071, -0.7071, 0.0,
    ]  # fmt: skip


def test_with_the_reference_s_estimator_what_is_kept_is_compared_with_all(world: World):
    """There a row that is rejected whole stays in the mean of its group."""
    plain, _ = credited(world, adv_estimator="grpo_verl")
    kept, _ = credited_but_for(world, 6, adv_estimator="grpo_verl", rollout_correction=KEEPING)
    expected = torch.where(kept["response_mask"].bool(), plain["advantages"], 0.0)
    assert torch.equal(kept["advantages"], expected)


def test_kl_in_the_reward_is_of_all_samples_and_equal_rewards_are_of_the_kept(world: World):
    """Without the row that scored 0 nothing of group a differs, nor of any other."""
    keys = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.5}}
    _, plain = credited(world, **keys)
    kept, figures = credited_but_for(world, 2, rollout_correction=KEEPING, **keys)
    assert not kept["advantages"].any()
    assert figures["actor/reward_kl_penalty"] == plain["actor/reward_kl_penalty"]


def test_bypass_leaves_weights_and_rejection_to_the_loss(world: World):
    found, figures = credited(world, rollout_correction={"preset": "bypass_pg_geo_rs_seq_tis"})
    assert figures == {}
    assert not {"rollout_is_weights", "rejected"} & found.keys()
