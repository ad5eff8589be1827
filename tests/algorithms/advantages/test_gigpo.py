import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import compute_advantage, get_adv_estimator_fn
from agentrl.collate import collate
from agentrl.config.schema.training import AlgorithmConfig
from tests.fakes.requests import build_request, observed, said
from tests.fakes.turn_rows import TurnRows, turn_rows


def relative(values: list[float], own: float, *, divide: bool) -> float:
    if max(values) == min(values):
        return 0.0
    centred = own - statistics.fmean(values)
    return centred / (statistics.stdev(values) + 1e-6) if divide else centred


def states_of(rows: TurnRows, row: int) -> list[int]:
    return [int(rows.state_ids[row, turn[0]]) for turn in rows.turns(row)]


def naive_gigpo(rows: TurnRows, gamma: float, weight: float, *, divide: bool) -> torch.Tensor:
    found = []
    for row in range(len(rows.index)):
        group, own = rows.group(row), rows.returns_to_go(row, gamma)
        if row not in group:
            found.append([0.0] * len(own))
            continue
        scores = {r: rows.returns_to_go(r, 1.0)[0] for r in group}
        episode = relative(list(scores.values()), scores[row], divide=divide)
        of_row = []
        for state, value in zip(states_of(rows, row), own, strict=True):
            steps = [
                other
                for r in group
                for at, other in zip(states_of(rows, r), rows.returns_to_go(r, gamma), strict=True)
                if at == state
            ]
            of_row.append(episode + weight * relative(steps, value, divide=divide))
        found.append(of_row)
    return rows.by_token(found)


@settings(deadline=None, max_examples=40)
@given(turn_rows(), st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_gigpo_equals_a_naive_loop(rows, gamma, weight, divide):
    config = AlgorithmConfig(gamma=gamma, step_advantage_w=weight, norm_adv_by_std_in_grpo=divide)
    advantages, returns = get_adv_estimator_fn("gigpo")(
        rows.rewards, rows.mask, rows.turn_ids, rows.state_ids, rows.index, config,
        in_baseline=rows.in_baseline,
    )  # fmt: skip
    expected = naive_gigpo(rows, gamma, weight, divide=divide)
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(advantages, returns)


@pytest.mark.parametrize("state", [-1, 7])
def test_a_state_that_is_not_known_or_was_met_once_adds_nothing(state):
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
    turn_ids = torch.tensor([[0, 1], [0, 1]])
    states = torch.tensor([[3, state], [3, -1]])
    advantages, _ = get_adv_estimator_fn("gigpo")(
        rewards, mask, turn_ids, states, np.array(["g", "g"], object),
        AlgorithmConfig(norm_adv_by_std_in_grpo=False),
    )  # fmt: skip
    assert advantages.tolist() == [[1.0, 0.5], [-1.0, -0.5]]


@pytest.mark.parametrize(("gamma", "step"), [(1.0, 0.0), (0.9, 0.05)])
def test_with_a_discount_equal_outcomes_differ_by_step_and_not_by_episode(gamma, step):
    """From the state in which both began, one took one turn to score 1 and the other two."""
    turn_ids = torch.tensor([[0, -1], [0, 1]])
    advantages, _ = get_adv_estimator_fn("gigpo")(
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]), (turn_ids >= 0).long(), turn_ids,
        torch.tensor([[3, -1], [3, 4]]), np.array(["g", "g"], object),
        AlgorithmConfig(gamma=gamma, norm_adv_by_std_in_grpo=False),
    )  # fmt: skip
    torch.testing.assert_close(advantages, torch.tensor([[step, 0.0], [-step, 0.0]]))


def test_states_of_different_groups_are_never_the_same():
    advantages, _ = get_adv_estimator_fn("gigpo")(
        torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64),
        torch.zeros(2, 1, dtype=torch.int64), np.array(["a", "b"], object), AlgorithmConfig(),
    )  # fmt: skip
    assert not advantages.any()


def test_a_collated_batch_compares_the_turns_that_saw_the_same_answer_of_a_tool():
    """Three samples; the tool answered two of them alike, and only one of those succeeded."""
    lengths, earned = [(2, 3), (2, 3), (2, 2)], [1.0, 0.0, 0.0]
    requests = [
        build_request(said(first), observed(second), said(1), uid="g", reward=reward)
        for (first, second), reward in zip(lengths, earned, strict=True)
    ]
    data = collate(requests, pad_token_id=0)
    config = AlgorithmConfig(adv_estimator="gigpo", norm_adv_by_std_in_grpo=False)
    advantages = compute_advantage(data, config).batch["advantages"]
    episode = torch.tensor([2 / 3, -1 / 3, -1 / 3])
    torch.testing.assert_close(advantages[:, 0], 2 * episode)  # all began with the same prompt
    last = data.batch["response_mask"].cumsum(-1).argmax(-1, keepdim=True)
    step = torch.tensor([0.5, -0.5, 0.0])
    torch.testing.assert_close(advantages.gather(1, last).squeeze(1), episode + step)
