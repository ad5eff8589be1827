import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import compute_advantage, get_adv_estimator_fn
from agentrl.collate import collate
from agentrl.config.schema.training import AlgorithmConfig
from tests.algorithms.advantages.test_token_level import naive_whiten
from tests.fakes.requests import build_request, observed, said, weighted
from tests.fakes.turn_rows import TurnRows, turn_rows

decays = st.sampled_from([0.0, 0.5, 1.0])


def naive_turn_rloo(rows: TurnRows, gamma: float) -> torch.Tensor:
    found = []
    for row in range(len(rows.index)):
        own, group = rows.returns_to_go(row, gamma), rows.group(row)
        others = [rows.returns_to_go(r, gamma) for r in group if r != row]
        if row not in group or not others:
            found.append([0.0] * len(own))
            continue
        held = [[other[min(k, len(other) - 1)] for other in others] for k in range(len(own))]
        found.append([value - sum(at) / len(at) for value, at in zip(own, held, strict=True)])
    return rows.by_token(found)


def turn_rloo(rows: TurnRows, gamma: float):
    return get_adv_estimator_fn("turn_rloo")(
        rows.rewards, rows.mask, rows.turn_ids, rows.index, gamma, in_baseline=rows.in_baseline
    )


@settings(deadline=None, max_examples=40)
@given(turn_rows(), decays)
def test_turn_rloo_equals_a_naive_loop(rows, gamma):
    advantages, returns = turn_rloo(rows, gamma)
    expected = naive_turn_rloo(rows, gamma)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)
    earned = [rows.returns_to_go(row, gamma) for row in range(len(rows.index))]
    torch.testing.assert_close(returns, rows.by_token(earned))


def test_turn_rloo_by_hand():
    """One sample earns 1, then 2; one earns 4 and stops, so at the second turn it stands for 4."""
    rewards = torch.tensor([[1.0, 9.0, 0.0, 2.0], [4.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])
    turn_ids = torch.tensor([[0, 1, 2, 2], [0, -1, -1, -1]])
    advantages, returns = get_adv_estimator_fn("turn_rloo")(
        rewards, mask, turn_ids, np.array(["g", "g"], object)
    )
    assert returns.tolist() == [[3.0, 0.0, 2.0, 2.0], [4.0, 0.0, 0.0, 0.0]]
    assert advantages.tolist() == [[-1.0, 0.0, -2.0, -2.0], [1.0, 0.0, 0.0, 0.0]]


@settings(deadline=None, max_examples=40)
@given(turn_rows())
def test_turn_rloo_of_an_outcome_alone_is_rloo(rows):
    last = rows.mask.cumsum(-1).argmax(-1, keepdim=True)
    rewards = torch.zeros_like(rows.rewards).scatter(1, last, rows.rewards.gather(1, last))
    outcome = rows._replace(rewards=rewards)
    expected, _ = get_adv_estimator_fn("rloo")(
        rewards, rows.mask, rows.index, in_baseline=rows.in_baseline
    )
    torch.testing.assert_close(turn_rloo(outcome, 1.0)[0], expected, rtol=1e-5, atol=1e-6)


def test_equal_rewards_equal_outcomes_give_exactly_zero_whoever_stopped_first():
    rewards = torch.full((17, 3), 0.0)
    turn_ids = torch.tensor([[0, 1, 2]] * 9 + [[0, -1, -1]] * 8)
    mask = (turn_ids >= 0).long()
    rewards.scatter_(1, mask.sum(-1, keepdim=True) - 1, 7.7)
    advantages, _ = get_adv_estimator_fn("turn_rloo")(
        rewards, mask, turn_ids, np.array(["g"] * 17, object)
    )
    assert not advantages.any()


def test_with_a_discount_equal_returns_to_go_train_nothing():
    """Two samples score 1, in one turn and in two: at gamma 0.9 the first turn is worth less."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    turn_ids = torch.tensor([[0, -1], [0, 1], [0, 1]])
    mask = (turn_ids >= 0).long()
    function = get_adv_estimator_fn("turn_rloo")
    pair = torch.tensor([0, 1]), torch.tensor([1, 2])
    for rows, gamma, expected in [
        (pair[0], 0.9, [[0.1, 0.0], [-0.1, 0.0]]),  # the second turn has nothing left to tell
        (pair[0], 1.0, [[0.0, 0.0], [0.0, 0.0]]),
        (pair[1], 0.9, [[0.0, 0.0], [0.0, 0.0]]),  # as many turns, and the same at each of them
    ]:
        index = np.array(["g", "g"], object)
        found, _ = function(rewards[rows], mask[rows], turn_ids[rows], index, gamma)
        torch.testing.assert_close(found, torch.tensor(expected))
        assert torch.equal(found == 0, torch.tensor(expected) == 0), "0 is exactly 0"


# Turn-wise GAE.


def naive_turn_gae(rows: TurnRows, gamma: float, lam: float) -> list[list[float]]:
    found = []
    for row in range(len(rows.index)):
        next_value, advantages = 0.0, []
        for turn in reversed(rows.turns(row)):
            value = rows.values[row, turn[0]].item()
            reward = sum(rows.rewards[row, position].item() for position in turn)
            later = advantages[0] if advantages else 0.0
            advantages.insert(0, reward + gamma * next_value - value + gamma * lam * later)
            next_value = value
        found.append(advantages)
    return found


@settings(deadline=None, max_examples=40)
@given(turn_rows(), decays, decays)
def test_turn_gae_equals_a_naive_loop(rows, gamma, lam):
    advantages, returns = get_adv_estimator_fn("turn_gae")(
        rows.rewards, rows.values, rows.mask, rows.turn_ids, gamma, lam
    )
    expected = naive_turn_gae(rows, gamma, lam)
    whitened = naive_whiten(rows.by_token(expected), rows.mask)
    torch.testing.assert_close(advantages, whitened, rtol=1e-4, atol=1e-4)
    learned = [
        [
            a + rows.values[row, turn[0]].item()
            for a, turn in zip(of_row, rows.turns(row), strict=True)
        ]
        for row, of_row in enumerate(expected)
    ]
    torch.testing.assert_close(returns, rows.by_token(learned), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(turn_rows(), decays, decays)
def test_turn_gae_of_turns_of_one_token_is_gae(rows, gamma, lam):
    turn_ids = torch.arange(rows.mask.shape[1]).expand_as(rows.mask)
    found = get_adv_estimator_fn("turn_gae")(
        rows.rewards, rows.values, rows.mask, turn_ids, gamma, lam
    )
    expected = get_adv_estimator_fn("gae")(rows.rewards, rows.values, rows.mask, gamma, lam)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("name", ["turn_rloo", "turn_gae"])
def test_rewards_of_turns_reach_their_own_turn(name):
    """A tool's reward for the first turn says nothing of the second."""
    requests = [
        build_request(said(2, reward=reward), observed(2), said(1), uid="g", reward=1.0)
        for reward in (0.0, 1.0)
    ]
    data = collate(requests, pad_token_id=0, reward=weighted(1.0))
    data.batch["values"] = torch.zeros(2, 5)
    config = AlgorithmConfig(adv_estimator=name)
    found = compute_advantage(data, config).batch["advantages"]
    assert found[0, 0] == found[0, 1] < found[1, 0] == found[1, 1]
    assert found[0, 4] == found[1, 4]


# The gradient of a policy that decides how many turns there are, exactly.

STOP, GROUP = 0, 3
Choice = tuple[int, int, int]
"""Turn, action before it, action: an entry of a table of logits or rewards."""


def all_episodes(num_turns: int, num_actions: int, so_far: tuple[Choice, ...] = ()) -> list:
    """All that can happen: each turn may be the last by choice, and the last one is."""
    before, found = so_far[-1][2] if so_far else 0, []
    for action in range(num_actions):
        episode = (*so_far, (len(so_far), before, action))
        ended = action == STOP or len(episode) == num_turns
        found += [episode] if ended else all_episodes(num_turns, num_actions, episode)
    return found


class Task:
    """A table of logits and one of rewards, `[K, A, A]`, with all groups of three enumerated.

    Every possible group is in the batch, so expectations are sums over it. Shapes: M episodes,
    K turns, A actions.
    """

    def __init__(self, logits: torch.Tensor, rewards: torch.Tensor, gamma: float = 1.0):
        self.logits, self.gamma = logits.double().requires_grad_(), gamma
        self.episodes = all_episodes(*logits.shape[:2])
        self.mask = torch.zeros(len(self.episodes), len(logits), dtype=torch.int64)
        self.rewards = self.mask.double()
        for row, episode in enumerate(self.episodes):
            for turn, choice in enumerate(episode):
                self.mask[row, turn], self.rewards[row, turn] = 1, rewards[choice]
        self.groups = torch.tensor(list(product(range(len(self.episodes)), repeat=GROUP)))

    def log_probs(self) -> torch.Tensor:
        """`[M, K]`, with gradient; 0 behind an episode's end."""
        table, found = self.logits.log_softmax(-1), torch.zeros_like(self.rewards)
        for row, episode in enumerate(self.episodes):
            for turn, choice in enumerate(episode):
                found[row, turn] = table[choice]
        return found

    def returns(self) -> torch.Tensor:
        """`[M, K]`: discounted returns-to-go."""
        found, later = torch.zeros_like(self.rewards), torch.zeros(len(self.rewards))
        for turn in reversed(range(found.shape[1])):
            found[:, turn] = later = self.rewards[:, turn] + self.gamma * later
        return found

    def gradient(self) -> torch.Tensor:
        """Of the expected sum of rewards, or, where gamma is not 1, of each turn's own return."""
        log_probs = self.log_probs()
        chances = log_probs.sum(-1).exp()
        expected = (chances * self.rewards.sum(-1)).sum()
        if self.gamma != 1:
            expected = (chances.detach()[:, None] * log_probs * self.returns()).sum()
        return torch.autograd.grad(expected, self.logits)[0]

    def expectation(self, advantages: torch.Tensor) -> torch.Tensor:
        """Of the policy gradient with `advantages` `[groups, 3, K]`, over all groups."""
        log_probs = self.log_probs()
        chances = log_probs.sum(-1).exp()[self.groups].prod(-1).detach()
        inside = torch.where(self.mask[self.groups] == 1, advantages, 0.0)
        surrogate = (chances[:, None, None] * log_probs[self.groups] * inside).sum() / GROUP
        return torch.autograd.grad(surrogate, self.logits)[0]

    def turn_rloo(self) -> torch.Tensor:
        """The registered estimator on all groups at once, `[groups, 3, K]`."""
        rows, index = self.groups.flatten(), np.arange(len(self.groups)).repeat(GROUP)
        mask = self.mask[rows]
        turn_ids = torch.arange(mask.shape[1]).expand_as(mask)
        advantages, _ = get_adv_estimator_fn("turn_rloo")(
            self.rewards[rows], mask, turn_ids, index, self.gamma
        )
        return advantages.view(-1, GROUP, mask.shape[1])

    def turn_index_normalised(self, *, divide: bool) -> torch.Tensor:
        """Returns-to-go centred (and divided) over the members that reached each turn."""
        returns, there = self.returns()[self.groups], self.mask[self.groups].double()
        count = there.sum(1, keepdim=True).clamp(min=1)
        centred = returns - (returns * there).sum(1, keepdim=True) / count
        squares = (centred.square() * there).sum(1, keepdim=True) / (count - 1).clamp(min=1)
        return centred / (squares.sqrt() + 1e-6) if divide else centred


def any_task(seed: int, gamma: float = 1.0, *, at_the_end: bool = False) -> Task:
    """Three turns, three actions, and rewards for every choice or for those that end."""
    torch.manual_seed(seed)
    logits, rewards = torch.randn(3, 3, 3), torch.rand(3, 3, 3)
    if at_the_end:
        rewards[:-1, :, STOP + 1 :] = 0.0
    return Task(logits, rewards, gamma)


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("seed", [0, 1])
def test_turn_rloo_is_the_policy_gradient_though_the_policy_decides_when_to_stop(
    seed, gamma, at_the_end
):
    task = any_task(seed, gamma, at_the_end=at_the_end)
    gradient = task.gradient()
    assert gradient.norm() > 0.05
    found = task.expectation(task.turn_rloo())
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)


def test_a_mean_with_oneself_in_it_shrinks_the_whole_gradient_alike():
    """Over all members, the stopped ones held: by 1 - 1 / n, which a step size makes up for."""
    task = any_task(0)
    last = task.mask.sum(-1, keepdim=True) - 1
    places = torch.arange(task.mask.shape[1])
    held = task.returns().gather(1, torch.minimum(places, last))[task.groups]
    found = task.expectation(task.returns()[task.groups] - held.mean(1, keepdim=True))
    torch.testing.assert_close(found, task.gradient() * (1 - 1 / GROUP), rtol=0, atol=1e-12)


def one_call_is_best() -> Task:
    """Going on has one probability, 0.3, at both turns where there is a choice.

    To answer at once earns 0.5, after one call 1, after two 0. What the logit of going on is worth:
    0.21 (0.7 - 0.5) = 0.042 at the first turn, 0.3 * 0.21 (0 - 1) = -0.063 at the second.
    """
    logits, rewards = torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)
    logits[:, :, STOP] = math.log(0.7 / 0.3)
    rewards[0, :, STOP], rewards[1, :, STOP] = 0.5, 1.0
    return Task(logits, rewards)


def of_going_on(gradient: torch.Tensor) -> float:
    """Along the logit of going on, which both turns share as the weights of a model are shared."""
    return gradient[:2, :, STOP + 1].sum().item()


@pytest.mark.parametrize(("divide", "biased"), [(False, 0.01099), (True, 0.0717)])
def test_normalising_by_turn_index_makes_longer_what_should_be_shorter(divide, biased):
    """Centring alone shrinks a turn by E[m / (1 + m)], m others that reached it: 2/3, then 0.27."""
    task = one_call_is_best()
    assert of_going_on(task.gradient()) == pytest.approx(-0.021)
    assert of_going_on(task.expectation(task.turn_rloo())) == pytest.approx(-0.021)
    found = task.expectation(task.turn_index_normalised(divide=divide))
    assert of_going_on(found) == pytest.approx(biased, abs=1e-5 if not divide else 1e-4)
