"""Rows of trajectories with several sequences: order, rewards, credit, weights."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import compute_advantage
from agentrl.algorithms.aggregation import LossScale, compute_row_weights
from agentrl.collate import collate, widest
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.messages import Message
from agentrl.rewards.placement import place_rewards
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason
from tests.fakes.requests import TurnPlan, _add_turn, build_request, observed, said, weighted

HI = Message(role="user", content="Hi")


def build_trajectory(*sequences: tuple[TurnPlan, ...], **fields: object) -> AsyncRolloutRequest:
    """Build a finished request of which all sequences but the last were set aside."""
    request = AsyncRolloutRequest(messages=[HI], **fields)
    request.take_edge(RequestState.RUNNING)
    for number, turns in enumerate(sequences):
        if number:
            request.set_aside("compaction", [HI])
        request.begin([100, 101])
        for plan in turns:
            _add_turn(request, plan)
    request.finish(StopReason.ANSWERED)
    return request


def test_each_sequence_has_a_row_and_the_last_one_has_the_reward() -> None:
    split = build_trajectory((said(2),), (said(1), observed(1), said(2)), uid="g", reward=1.0)
    plain = build_request(said(3), uid="g", reward=0.0)
    data = collate([split, plain], pad_token_id=0)
    assert data.batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 1, 0]]
    assert data.batch["token_level_scores"].tolist() == [[0] * 4, [0, 0, 0, 1], [0] * 4]
    first, second, third = data.batch["trajectory_ids"].tolist()
    assert first == second != third
    assert data.non_tensor_batch["reward_index"].tolist() == [None, 3, 2]
    assert data.non_tensor_batch["stop_reason"].tolist() == ["continued", "answered", "answered"]
    assert data.non_tensor_batch["uid"].tolist() == ["g", "g", "g"]
    assert len(set(data.non_tensor_batch["request_id"])) == 3
    assert widest([split, plain]) == (3, 4)


def test_rewards_of_turns_are_on_their_own_turns() -> None:
    request = build_trajectory(
        (said(2, reward=0.25), observed(1)), (said(1, reward=0.5), said(1)), reward=1.0
    )
    placed = place_rewards(request, weighted(1.0))
    assert placed.combined == 1.75
    parts = [[tuple(one) for one in part.rewards] for part in placed.by_sequence()]
    assert parts == [[(1, 0.25)], [(0, 0.5), (1, 1.0)]]


def test_reward_of_a_trajectory_without_a_last_trained_token_is_on_an_earlier_sequence() -> None:
    request = build_trajectory((said(2),), (said(1, excluded=True),), reward=1.0)
    data = collate([request], pad_token_id=0)
    assert data.batch["token_level_scores"].tolist() == [[0, 1], [0, 0]]


def test_final_trains_only_the_last_sequence_and_keeps_the_sum() -> None:
    request = build_trajectory((said(2, reward=0.25),), (said(2),), reward=1.0)
    data = collate([request], pad_token_id=0, segment_credit="final", reward=weighted(1.0))
    assert data.batch["response_mask"].tolist() == [[0, 0], [1, 1]]
    assert data.batch["token_level_scores"].tolist() == [[0, 0], [0.25, 1.0]]


def test_failed_request_trains_no_branch_and_a_failed_delegate_only_itself_not() -> None:
    failed = build_request(said(1), stop_reason=StopReason.FAILED)
    helper = build_request(said(1), request_id="helper")
    failed.branches.append(helper)
    broken = build_request(said(2), stop_reason=StopReason.FAILED, request_id="broken")
    well = build_request(said(1), request_id="well")
    well.add_branch(broken, "delegate")
    data = collate([failed, well], pad_token_id=0)
    assert data.batch["response_mask"].any(dim=1).tolist() == [False, False, False, True]
    assert data.batch["in_baseline"].tolist() == [False, False, True, True]


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=2, max_size=4),
    data=st.data(),
    estimator=st.sampled_from(["grpo", "rloo", "turn_gae", "reinforce_plus_plus", "turn_rloo"]),
    mode=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]),
)
def test_layout_is_invisible_requests_split_at_random_have_the_same_gradients(
    sizes: list[list[int]], data: st.DataObject, estimator: str, mode: str
) -> None:
    """The same turns in one sequence or in several: same advantages, same gradient per token."""
    whole, split = [], []
    for number, turns in enumerate(sizes):
        rewards = [data.draw(st.integers(0, 4)) / 4 for _ in turns]
        plans = [said(size, reward=r) for size, r in zip(turns, rewards, strict=True)]
        cuts = [data.draw(st.booleans()) for _ in turns[1:]]
        parts = [[plans[0]]]
        for plan, is_cut in zip(plans[1:], cuts, strict=True):
            parts.append([plan]) if is_cut else parts[-1].append(plan)
        fields = {"uid": str(number // 2), "reward": data.draw(st.integers(0, 4)) / 4}
        whole.append(build_trajectory(tuple(plans), **fields))
        split.append(build_trajectory(*map(tuple, parts), **fields))
    gradients = []
    for requests in (whole, split):
        batch = collate(requests, pad_token_id=0, reward=weighted(0.5))
        mask = batch.batch["response_mask"]
        batch.batch["values"] = mask * 0.25
        config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.5)
        advantages = compute_advantage(batch, config).batch["advantages"]
        log_probs = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
        weights = compute_row_weights(mask, batch.batch["trajectory_ids"])
        scale = LossScale.of(mask, row_weights=weights)
        loss = scale.aggregate(-advantages * log_probs.exp(), mask, mode)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        gradients.append(gradient[mask.bool()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)
