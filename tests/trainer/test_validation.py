"""What validation counts as success, and what else it measures."""

from typing import Any

import numpy as np
import pytest
import torch

from agentrl.config.schema.reward import RewardConfig, RewardFunctionConfig
from agentrl.rewards.scoring import read_score
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.trainer.metrics.aggregators import compute_values
from agentrl.trainer.metrics.rollout import reward_metrics
from agentrl.trainer.validation import (
    SuccessRule,
    describe_success,
    measure_success,
    read_outcome,
    validation_metrics,
)
from tests.fakes.requests import build_request, observed, said, weighted

PLAIN = RewardConfig()


def scored(returned: Any, *turns: Any, **fields: Any) -> AsyncRolloutRequest:
    """A finished request whose scorer returned this."""
    value, extra = read_score(returned)
    return build_request(*(turns or (said(2),)), reward=value, reward_extra_info=extra, **fields)


@pytest.mark.parametrize(
    ("returned", "success", "rule"),
    [
        ({"score": 0.1, "success": False, "acc": 1.0}, 0.0, SuccessRule.SUCCESS),
        ({"score": 0.0, "success": True}, 1.0, SuccessRule.SUCCESS),
        ({"score": 0.1, "acc": 0.0}, 0.0, SuccessRule.ACC),
        ({"score": 0.0, "acc": np.bool_(True)}, 1.0, SuccessRule.ACC),
        ({"score": 0.0, "success": torch.tensor(0.5)}, 0.5, SuccessRule.SUCCESS),
        ({"score": 0.0, "success": "False"}, 0.0, SuccessRule.UNREADABLE),
        ({"score": 0.0, "success": "False", "acc": 0.25}, 0.25, SuccessRule.ACC),
        ({"score": 0.5, "success": None}, 0.5, SuccessRule.COMBINED),
        (0.1, 0.1, SuccessRule.COMBINED),
    ],
)
def test_success_is_what_the_scorer_calls_so_else_the_reward(
    returned: Any, success: float, rule: SuccessRule
):
    assert measure_success(scored(returned), PLAIN) == (rule, pytest.approx(success))


def test_bare_number_is_no_verdict_when_the_interaction_alone_is_rewarded():
    config = weighted(1.0, trajectory=0.0)
    request = scored(0.0, said(2, reward=0.75))
    assert measure_success(request, config) == (SuccessRule.COMBINED, 0.75)
    assert read_outcome(request, config).combined_reward == 0.75
    assert measure_success(scored({"score": 0.0, "acc": 1}, said(2)), config)[1] == 1.0


def test_threshold_is_applied_to_the_combined_reward_whatever_the_scorer_says():
    config = weighted(1.0, success_threshold=1.5)
    for turn_reward, success in ((0.5, 1.0), (0.25, 0.0)):
        request = scored({"score": 1.0, "success": False}, said(2, reward=turn_reward))
        assert measure_success(request, config) == (SuccessRule.THRESHOLD, success)


def test_request_that_failed_has_no_success():
    request = build_request(said(2), stop_reason=StopReason.FAILED, reward=1.0)
    for config in (PLAIN, RewardConfig(success_threshold=0.0)):
        assert measure_success(request, config) == (SuccessRule.FAILED, 0.0)


def test_rule_of_success_is_named():
    def outcomes(*returned: Any):
        return [read_outcome(scored(one), PLAIN) for one in returned]

    assert describe_success("a", outcomes(1.0, 0.5)).startswith("success on a is the combined rew")
    mixed = describe_success("a", outcomes({"score": 1, "acc": 0}, {"score": 0, "acc": 1}, 0.5))
    assert mixed.startswith("success on a is the scorer's `acc` (2 requests), the combined reward")


def test_validation_logs_combined_reward_turns_and_the_scorers_own_numbers():
    asked = {"score": 1.0, "acc": 1.0, "asked": 3, "said": "so", "odd": float("nan")}
    config = weighted(2.0)
    requests = [
        scored(asked, said(2, reward=0.5), observed(1), said(1)), scored({"score": 0.0, "asked": 1})
    ]  # fmt: skip
    metrics = validation_metrics("a", [read_outcome(one, config) for one in requests])
    assert metrics["val/a/reward/mean"] == 0.5
    assert metrics["val/a/combined_reward/mean"] == 1.0
    assert metrics["val/a/num_turns/mean"] == sum(one.num_turns for one in requests) / 2 == 3.0
    assert metrics["val/a/scorer/asked/mean"] == 2.0
    assert metrics["val/a/scorer/acc/mean"] == 1.0
    assert {name for name in metrics if "scorer" in name} == {
        "val/a/scorer/asked/mean", "val/a/scorer/acc/mean",
    }  # fmt: skip


def test_training_logs_the_scorers_own_numbers_once():
    config = RewardConfig(functions=[RewardFunctionConfig(name="qa", weight=2.0)])
    returned = {"score": 2.0, "qa": 1.0, "f1": 0.5, "length_penalty": -0.5}
    metrics = compute_values(reward_metrics([scored(returned)], config))
    assert metrics["reward/qa/mean"] == 1.0
    assert {name for name in metrics if name.startswith("scorer/")} == {
        "scorer/f1/mean", "scorer/f1/max", "scorer/f1/min",
    }  # fmt: skip
    assert not compute_values(reward_metrics([scored(0.5)], PLAIN))


def test_scorer_that_makes_up_keys_does_not_fill_the_log():
    requests = [scored({"score": 0.0, f"problem {n}": n}) for n in range(200)]
    assert len(validation_metrics("a", [read_outcome(one, PLAIN) for one in requests])) == 58
    assert len(reward_metrics(requests, PLAIN)) == 150
