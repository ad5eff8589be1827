from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import (
    LossScale,
    get_policy_loss_fn,
    with_summary,
)
from agentrl.algorithms.losses.covariance import cut_for_kl_cov
from agentrl.algorithms.losses.registry import DEFAULTS, TrainedTokens
from agentrl.algorithms.losses.token_loss import LossInputs
from agentrl.config.schema.training import ActorConfig, LossAggMode, PolicyLossConfig
from tests.fakes.loss_rows import call, column
from tests.fakes.naive_losses import (
    BUDGET,
    NAIVE,
    RAGGED,
    choose,
    config_of,
    invariant_losses,
    make_batch,
    naive_loss,
)
from tests.fakes.tensors import masks

MODES = list(get_args(LossAggMode))
all_losses = pytest.mark.parametrize("name", invariant_losses())
all_modes = pytest.mark.parametrize("mode", MODES)


# Every loss against its formula in a loop, and against central differences of that loop.


def test_every_bundled_loss_has_a_naive_loop():
    assert set(NAIVE) == set(invariant_losses())


@all_losses
@settings(deadline=None, max_examples=30)
@given(mask=masks(), seed=st.integers(0, 99), mode=st.sampled_from(MODES))
def test_loss_equals_a_naive_loop(name, mask, seed, mode):
    batch, config = make_batch(mask, seed), config_of(name)
    inside = mask.bool()
    tokens = TrainedTokens(batch.old[inside], batch.advantages[inside])
    named = config.model_copy(
        update={"policy_loss": config.policy_loss.model_copy(update={"loss_mode": name})}
    )
    scale = with_summary(LossScale.of(mask, loss_scale_factor=BUDGET), [tokens], named)
    found, _ = get_policy_loss_fn(name)(
        batch.old, batch.new, batch.advantages, mask, mode, config, batch.weights, scale=scale
    )
    expected = naive_loss(name, mode, batch, batch.new, choose(name, batch))
    # The weights of the bypass are float32, as everywhere.
    exact = name != "bypass_mode"
    tolerances = {"rel": 1e-9, "abs": 1e-12} if exact else {"rel": 1e-5, "abs": 1e-6}
    assert found.item() == pytest.approx(expected, **tolerances)


@all_losses
@all_modes
def test_gradient_equals_central_differences_with_stopped_factors_frozen(name, mode):
    batch, config = make_batch(RAGGED, seed=5), config_of(name)
    inside = RAGGED.bool()
    tokens = TrainedTokens(batch.old[inside], batch.advantages[inside])
    named = config.model_copy(
        update={"policy_loss": config.policy_loss.model_copy(update={"loss_mode": name})}
    )
    scale = with_summary(LossScale.of(RAGGED, loss_scale_factor=BUDGET), [tokens], named)
    leaf = batch.new.clone().requires_grad_()
    loss, _ = get_policy_loss_fn(name)(
        batch.old, leaf, batch.advantages, RAGGED, mode, config, batch.weights, scale=scale
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    chosen, step = choose(name, batch), 1e-6
    for i, t in inside.nonzero().tolist():
        nudge = torch.zeros_like(batch.new)
        nudge[i, t] = step
        higher, lower = (
            naive_loss(name, mode, batch, moved, chosen)
            for moved in (batch.new + nudge, batch.new - nudge)
        )
        expected = (higher - lower) / (2 * step)
        assert gradient[i, t].item() == pytest.approx(expected, rel=1e-5, abs=1e-8)
    assert not gradient[~inside].any()


@all_losses
def test_importance_weights_multiply_each_token_s_loss(name):
    batch, config = make_batch(RAGGED, seed=2), config_of(name)
    function = get_policy_loss_fn(name)
    args = (batch.old, batch.new, batch.advantages, RAGGED, "token-sum", config)
    alone = torch.zeros_like(batch.new)
    total = 0.0
    for i, t in RAGGED.nonzero().tolist():
        only = alone.clone()
        only[i, t] = 1.0
        total += function(*args, only)[0].item() * batch.weights[i, t].item()
    assert function(*args, batch.weights)[0].item() == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("name", sorted({*invariant_losses()} - {"clip_cov"}))
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(name):
    """All losses follow -A grad log pi there, but for the tokens that `clip_cov` holds back."""
    batch = make_batch(RAGGED, seed=3)
    leaf = batch.old.clone().requires_grad_()
    loss, _ = get_policy_loss_fn(name)(
        batch.old, leaf, batch.advantages, RAGGED, "token-sum", config_of(name)
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    expected = torch.where(RAGGED.bool(), -batch.advantages, 0.0)
    if name == "geo_mean":  # each token moves the ratio of the whole sequence
        sums = expected.sum(dim=-1, keepdim=True)
        expected = RAGGED * sums / RAGGED.sum(dim=-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(gradient, expected)


def test_log_ratios_are_clamped_and_zero_where_masked():
    new, old = torch.tensor([0.0, -90.0, torch.nan]), torch.tensor([-90.0, 0.0, 0.0])
    inputs = LossInputs.of(old, new, new, torch.tensor([1, 1, 0]), DEFAULTS, None)
    assert inputs.log_ratio.tolist() == [20.0, -20.0, 0.0]


@all_losses
@pytest.mark.parametrize(("old", "new"), [(-1000.0, -1e-3), (-1e-3, -1000.0), (-1e-9, 0.0)])
def test_extreme_log_probabilities_stay_finite(name, old, new):
    leaf = torch.full((2, 3), new, requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]])
    loss, metrics = get_policy_loss_fn(name)(
        torch.full((2, 3), old), leaf, advantages, torch.ones(2, 3), "token-mean", config_of(name)
    )
    loss.backward()
    assert leaf.grad is not None
    assert all(torch.isfinite(x).all() for x in (loss, leaf.grad, *metrics.values()))


# Losses by covariance hold back their share of the tokens, ties or none.


def common_zeros(rows: int = 40, width: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of which half are exactly 0, and one advantage for each row."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, width, generator=generator)
    old[:, ::2] = 0.0
    return old, torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous()


@pytest.mark.parametrize(
    ("name", "figure", "bounds"),
    [
        ("kl_cov", "actor/kl_cov_frac", {}),
        ("clip_cov", "actor/pg_clipfrac", {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0}),
    ],
)
@pytest.mark.parametrize("share", [0.002, 0.01, 0.3])
def test_tokens_that_tie_do_not_raise_the_share_that_is_held_back(name, figure, bounds, share):
    old, advantages = common_zeros()
    own = {"loss_mode": name, f"{name}_ratio": share, **bounds}
    _, metrics = call(name, old, old, advantages, policy_loss=own)
    assert metrics[figure].item() == pytest.approx(share, rel=1e-4)


def test_tokens_that_tie_for_the_last_places_share_them():
    """Four places: two are taken outright, three tokens tie for the two that are left."""
    old, advantages = column(0, -1, -1, -1, -2, -7), column(4, 2, 2, 2, -4, -6)
    cut = cut_for_kl_cov(
        TrainedTokens(old.flatten(), advantages.flatten()),
        ActorConfig(policy_loss=PolicyLossConfig(kl_cov_ratio=0.67)),
    )
    everywhere = torch.ones(1, 6, dtype=torch.bool)
    covariances = ((old + 2) * advantages).tolist()
    assert covariances == [[8.0, 2.0, 2.0, 2.0, 0.0, 30.0]]
    assert cut.chosen(old, advantages, everywhere).tolist() == [
        [1.0, pytest.approx(2 / 3), pytest.approx(2 / 3), pytest.approx(2 / 3), 0.0, 1.0]
    ]


def test_covariances_that_are_rounding_noise_tie():
    """Equal advantages: every covariance is 0 but for the rounding of the mean."""
    old = -torch.rand(1, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens = TrainedTokens(old.flatten(), torch.full((1000,), 0.1, dtype=torch.float64))
    cut = cut_for_kl_cov(tokens, ActorConfig(policy_loss=PolicyLossConfig(kl_cov_ratio=0.1)))
    chosen = cut.chosen(old, torch.full_like(old, 0.1), torch.ones(1, 1000, dtype=torch.bool))
    assert chosen.unique().tolist() == [0.1]
