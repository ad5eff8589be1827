"""Credit: the KL in the reward, whom it spares, and the weight that it has."""

import json
from collections.abc import Iterator

import pytest
import torch

from agentrl.config.schema.training import AlgorithmConfig
from agentrl.protocol import DataProto
from agentrl.trainer.credit import Credit
from agentrl.workers.distributed import World, start_world, stop_world
from tests.fakes.scored_batch import ADAPTIVE, credited, scored_batch

BY_TURN = ["turn_rloo", "step_reinforce", "gigpo"]


@pytest.fixture
def world() -> Iterator[World]:
    yield start_world("cpu", timeout_s=60)
    stop_world()


def test_kl_is_taken_off_the_scores_of_trained_tokens(world: World):
    plain, _ = credited(world)
    found, figures = credited(
        world, adv_estimator="reinforce_plus_plus", use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.5}
    )
    mask = plain["response_mask"].bool()
    kl = torch.where(mask, plain["old_log_probs"] - plain["ref_log_prob"], 0.0)
    torch.testing.assert_close(found["token_level_rewards"], plain["token_level_scores"] - 0.5 * kl)
    rows = mask.any(-1)
    mean = (kl.sum(-1) / mask.sum(-1).clamp(min=1))[rows].mean()
    assert figures["actor/reward_kl_penalty"] == pytest.approx(mean.item(), abs=1e-6)
    assert figures["actor/reward_kl_penalty_coeff"] == 0.5


def test_equal_rewards_a_kl_does_not_make_equal_scores_differ(world: World):
    found, _ = credited(world, use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.5})
    plain, _ = credited(world)
    group_b = torch.tensor([1, 5])
    assert not found["advantages"][group_b].any()
    assert torch.equal(found["token_level_rewards"][group_b], plain["token_level_scores"][group_b])
    assert not torch.equal(found["advantages"][0], plain["advantages"][0]), "group a feels the KL"


def pair_by_turn(earned: list[list[float]]) -> DataProto:
    """Two samples of a prompt, turns of one token each, and what each turn earned."""
    shape = (2, len(earned[0]))
    return DataProto.from_dict(
        {
            "response_mask": torch.tensor(earned).isfinite().long(),
            "token_level_scores": torch.tensor(earned),
            "old_log_probs": torch.full(shape, -1.0),
            "ref_log_prob": torch.tensor([[-1.1], [-1.3]]).expand(shape).contiguous(),
            "turn_ids": torch.arange(shape[1]).expand(shape).contiguous(),
            "state_ids": torch.zeros(shape, dtype=torch.int64),
        },
        {"uid": ["a", "a"]},
    )


NAN = float("nan")


@pytest.mark.parametrize("name", BY_TURN)
@pytest.mark.parametrize(
    ("earned", "gamma", "is_silent"),
    [
        ([[0.0, 1.0], [0.0, 1.0]], 1.0, True),
        ([[0.0, 1.0], [1.0, NAN]], 1.0, True),
        ([[0.0, 1.0], [1.0, NAN]], 0.9, False),  # equal scores, one turn later
        ([[0.0, 1.0], [1.0, 0.0]], 1.0, False),  # equal scores, other turns
    ],
)
def test_only_a_group_with_equal_turn_rewards_gets_no_kl(
    world: World, name: str, earned: list[list[float]], gamma: float, is_silent: bool
):
    keys = {"adv_estimator": name, "gamma": gamma, "use_kl_in_reward": True,
            "kl_ctrl": {"kl_coef": 0.5}}  # fmt: skip
    batch = pair_by_turn(earned)
    Credit(AlgorithmConfig.model_validate(keys), world).compute(batch)
    mask = batch.batch["response_mask"].bool()
    scores, rewards = (batch.batch[f"token_level_{kind}"] for kind in ("scores", "rewards"))
    assert torch.equal(rewards[mask], scores[mask]) == is_silent
    assert batch.batch["advantages"].any() == (not is_silent)


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


def test_one_log_probability_that_is_no_number_does_not_spoil_the_weight_of_the_kl(world: World):
    config = AlgorithmConfig.model_validate({"use_kl_in_reward": True, "kl_ctrl": ADAPTIVE})
    credit, batch = Credit(config, world), scored_batch()
    batch.batch["ref_log_prob"][0, 0] = torch.nan
    credit.compute(batch)
    credit.commit()
    assert credit.state_dict() == {"kl_coef": 0.1}
    credit.compute(scored_batch())
    credit.commit()
    assert credit.kl_ctrl.value not in (0.1, pytest.approx(float("nan"), nan_ok=True))


def test_a_fixed_weight_is_the_configuration_s_whatever_a_checkpoint_says(world: World):
    credit = Credit(AlgorithmConfig.model_validate({"kl_ctrl": {"kl_coef": 0.3}}), world)
    credit.load_state_dict({"kl_coef": 7.0})
    assert credit.kl_ctrl.value == 0.3
    credit.load_state_dict({})
