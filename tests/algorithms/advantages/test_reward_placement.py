"""What each estimator makes of each placement: the sums are the same in all of them."""

import inspect
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import adv_estimator_names, compute_advantage, get_adv_estimator_fn
from agentrl.collate import collate
from agentrl.config.schema.reward import Placement
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.config.tables import method_facts
from agentrl.protocol import DataProto
from agentrl.rollout.request import AsyncRolloutRequest
from tests.fakes.requests import TurnPlan, build_request, observed, said, weighted

SUM_ESTIMATORS, TURN_ESTIMATORS = (
    {name for name, facts in method_facts().estimators.items() if facts.rewards == kind}
    for kind in ("sum", "turns")
)
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
BUNDLED = [
    name
    for name in adv_estimator_names()
    if get_adv_estimator_fn(name).__module__.startswith("agentrl.")
]
KEY = "format"
scores = st.sampled_from([0.0, 0.1, 0.7, 1.0, 7.7])


@st.composite
def samples(draw: Any) -> AsyncRolloutRequest:
    """One sample of a group: turns with calls, answers and observations, and rewards of each."""
    plans: list[TurnPlan] = []
    for _ in range(draw(st.integers(1, 3))):
        call = said(draw(st.integers(2, 5)), call_rewards=(draw(scores),), call_spans=((0, 2),))
        plans += [draw(st.sampled_from([call, said(2, reward=draw(scores))])), observed(2)]
    extra = {KEY: draw(scores)}
    return build_request(*plans, said(3), uid="g", reward=draw(scores), reward_extra_info=extra)


def batch_of(requests: Sequence[AsyncRolloutRequest], placement: Placement) -> DataProto:
    data = collate(requests, pad_token_id=0, reward=weighted(0.5, placement=placement))
    shape = data.batch["responses"].shape
    steps = torch.arange(float(shape[0] * shape[1])).view(shape)
    data.batch["values"] = steps / 100
    data.batch["old_log_probs"] = -steps / 50
    data.batch["sum_pi_squared"] = torch.full(shape, 0.5)
    data.batch["reward_baselines"] = torch.zeros(shape[0])
    return data


def advantages(name: str, data: DataProto) -> torch.Tensor:
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, gdpo_reward_keys=(KEY,))
    return compute_advantage(data.select(), config).batch["advantages"]


@settings(deadline=None, max_examples=25)
@given(st.lists(samples(), min_size=2, max_size=4))
def test_equal_rewards_estimators_of_an_outcome_see_no_placement_to_the_last_bit(requests):
    batches = [batch_of(requests, placement) for placement in PLACEMENTS]
    for name in (name for name in SUM_ESTIMATORS if not name.endswith("_verl")):
        first, *others = (advantages(name, data) for data in batches)
        assert all(torch.equal(first, other) for other in others), name


@settings(deadline=None, max_examples=25)
@given(scores, st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_equal_rewards_equal_rewards_of_unequal_lengths_are_exactly_zero(score, lengths):
    requests = [
        build_request(*(said(3) for _ in range(length)), said(2), uid="g", reward=score)
        for length in lengths
    ]
    for placement in PLACEMENTS:
        found = advantages("grpo", batch_of(requests, placement))
        assert not found.any()


FIXED = [
    build_request(said(4, call_rewards=(0.5,), call_spans=((1, 3),)), observed(2), said(2),
                  said(3), uid="g", reward=reward, reward_extra_info={KEY: reward})
    for reward in (0.0, 1.0, 3.0)
]  # fmt: skip


def sees_places(name: str) -> bool:
    first, *others = (advantages(name, batch_of(FIXED, placement)) for placement in PLACEMENTS)
    return not all(torch.allclose(first, other) for other in others)


def test_the_table_names_the_estimators_to_which_a_placement_is_nothing():
    blind = {name for name in BUNDLED if not sees_places(name)}
    assert blind == SUM_ESTIMATORS | {"gdpo", "gdpo_verl"}


def test_the_table_names_the_estimators_of_turns():
    asks = {
        name for name in BUNDLED
        if "turn_ids" in inspect.signature(get_adv_estimator_fn(name)).parameters
    }  # fmt: skip
    assert asks == TURN_ESTIMATORS


@pytest.mark.parametrize("name", sorted(TURN_ESTIMATORS))
def test_a_turn_s_own_reward_is_one_number_to_estimators_of_turns(name: str):
    """Where turns alone are rewarded, on which of a turn's tokens it lies makes no difference."""
    requests = [
        build_request(said(4, reward=reward), observed(2), said(2, reward=1 - reward), uid="g")
        for reward in (0.0, 0.7, 1.0)
    ]
    found = [advantages(name, batch_of(requests, placement)) for placement in PLACEMENTS]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_spread_outcome_leaves_less_to_the_turns_that_come_last():
    """The run reports this: the last turn earned the whole reward, and gets a part."""
    requests = [build_request(said(2), said(2), uid="g", reward=reward) for reward in (0.0, 1.0)]
    whole, spread = (
        advantages("turn_rloo", batch_of(requests, placement))
        for placement in ("last_token", "uniform")
    )
    assert whole[1, -1] == 1.0
    assert spread[1, -1] == 0.5
