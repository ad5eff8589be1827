import math

import pytest
import torch

from agentrl.algorithms import kl_penalty
from agentrl.errors import ConfigError

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
