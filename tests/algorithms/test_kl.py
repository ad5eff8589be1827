"""Estimates of the KL, the KL in the reward, and the controllers of its weight."""

import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import kl, kl_penalty
from agentrl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    compute_reward_kl,
    get_kl_controller,
    measure_kl,
    penalize_rewards,
)
from agentrl.config.schema.training import KlCtrlConfig
from agentrl.errors import ConfigError
from tests.fakes.tensors import masks

KL_NAMES = ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", KL_NAMES)
def test_kl_by_hand(name):
    logprob, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    expected = {
        "k1": [1.0, -1.0], "abs": [1.0, 1.0], "k2": [0.5, 0.5], "k3": [math.exp(-1), math.e - 2],
    }  # fmt: skip
    same_as = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    found = kl_penalty(logprob, ref, name)
    torch.testing.assert_close(found, torch.tensor(expected[same_as.get(name, name)]))


@pytest.mark.parametrize("name", KL_NAMES)
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(name):
    logprob, ref = noise(5).requires_grad_(), noise(5, seed=1)
    straight = kl_penalty(logprob, ref, f"{name}+")
    torch.testing.assert_close(straight, kl_penalty(logprob, ref, name))
    gradient = torch.autograd.grad(straight.sum(), logprob)[0]
    torch.testing.assert_close(gradient, (logprob - ref).detach())


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradient_of_kl_equals_central_differences(name):
    ref = noise(6, seed=1)
    start = noise(6).requires_grad_()
    assert torch.autograd.gradcheck(lambda logprob: kl_penalty(logprob, ref, name), start)


def test_k1_and_k3_are_unbiased_over_the_vocabulary():
    policy, reference = noise(7).log_softmax(-1), noise(7, seed=1).log_softmax(-1)
    true = (policy.exp() * (policy - reference)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_penalty(policy, reference, name)).sum(), true)


def test_k3_stays_finite():
    found = kl_penalty(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]), "k3")
    assert found.tolist() == [10.0, 10.0]


def test_an_unknown_kl_names_the_known_ones():
    with pytest.raises(ConfigError, match="low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")


ESTIMATES = ["k1", "abs", "k2", "k3"]


def log_probs(mask: torch.Tensor, seed: int) -> torch.Tensor:
    return -torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) * 3


def naive_kl(policy: float, reference: float, estimate: str) -> float:
    d = policy - reference
    return {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[estimate]


@settings(max_examples=40, deadline=None)
@given(masks(), st.sampled_from(ESTIMATES))
def test_rewards_lose_the_kl_token_by_token(mask: torch.Tensor, estimate: str):
    old, ref, scores = (log_probs(mask, seed) for seed in range(3))
    kl = compute_reward_kl(old, ref, mask, estimate)
    rewards = penalize_rewards(scores, kl, 0.3)
    means: list[float] = []
    for row in range(mask.shape[0]):
        found: list[float] = []
        for t in range(mask.shape[1]):
            expected = scores[row, t].item()
            if mask[row, t]:
                one = naive_kl(old[row, t].item(), ref[row, t].item(), estimate)
                expected -= 0.3 * one
                found.append(one)
            assert rewards[row, t].item() == pytest.approx(expected, abs=1e-5)
        if found:
            means.append(sum(found) / len(found))
    measured = measure_kl(kl, mask)
    assert measured.num_sequences == len(means)
    assert measured.current_kl == pytest.approx(sum(means) / max(len(means), 1), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(masks(), st.sampled_from(ESTIMATES))
def test_observations_are_invisible_masked_tokens_are_not_in_the_kl(
    mask: torch.Tensor, estimate: str
):
    old, ref = log_probs(mask, 0), log_probs(mask, 1)
    spoiled = old.masked_fill(mask == 0, torch.nan), ref.masked_fill(mask == 0, -torch.inf)
    kl = compute_reward_kl(old, ref, mask, estimate)
    assert torch.equal(compute_reward_kl(*spoiled, mask, estimate), kl)
    assert not kl[mask == 0].any()
    assert measure_kl(kl.masked_fill(mask == 0, torch.nan), mask) == measure_kl(kl, mask)


def test_exempt_sequences_keep_their_scores_to_the_bit():
    scores, kl = torch.full((2, 3), 0.1), torch.full((2, 3), 7.7)
    rewards = penalize_rewards(scores, kl, 0.5, exempt=torch.tensor([True, False]))
    assert torch.equal(rewards[0], scores[0])
    torch.testing.assert_close(rewards[1], torch.full((3,), 0.1 - 3.85))


def test_nothing_trained_has_no_kl():
    assert measure_kl(torch.ones(2, 3), torch.zeros(2, 3)) == (0.0, 0)


def test_an_unknown_estimate_is_refused():
    with pytest.raises(ConfigError, match="low_var_kl"):
        compute_reward_kl(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "full")


@pytest.mark.parametrize(
    ("current", "steps", "expected"),
    [
        (0.2, 50, 0.1 * 1.1),  # twice the target: the error is clipped to 0.2
        (0.11, 50, 0.1 * 1.05),
        (0.1, 50, 0.1),
        (0.09, 100, 0.1 * 0.9),
        (0.0, 50, 0.1 * 0.9),
        (-1.0, 50, 0.1 * 0.9),
    ],
)
def test_adaptive_weight_by_hand(current: float, steps: int, expected: float):
    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=100)
    controller.update(current, steps)
    assert controller.value == pytest.approx(expected)


@pytest.mark.parametrize("current", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_moves_nothing(current: float):
    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=100)
    controller.update(current, 50)
    assert controller.value == 0.1
    controller.update(0.2, 50)
    assert controller.value == pytest.approx(0.1 * 1.1), "the next batch counts as ever"


def test_fixed_weight_stays():
    controller = FixedKLController(0.1)
    controller.update(100.0, 1000)
    assert controller.value == 0.1


def test_controllers_are_chosen_by_type():
    assert isinstance(get_kl_controller(KlCtrlConfig()), FixedKLController)
    config = KlCtrlConfig(type="adaptive", kl_coef=0.3, target_kl=0.2, horizon=7)
    found = get_kl_controller(config)
    assert isinstance(found, AdaptiveKLController)
    assert (found.value, found.target, found.horizon) == (0.3, 0.2, 7)


def test_the_example_of_the_docstring_holds():
    assert doctest.testmod(kl).failed == 0
