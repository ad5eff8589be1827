import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import (
    LossScale,
    agg_loss,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    kl_penalty,
    masked_mean,
    masked_sum,
    register_policy_loss,
)
from agentrl.algorithms.losses import clamped_log_ratio
from agentrl.config.schema import ActorConfig, LossAggMode
from agentrl.errors import ConfigError
from tests.fakes_tensors import masks

MODES = list(get_args(LossAggMode))
KL_NAMES = ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]
BUDGET = 16
all_modes = pytest.mark.parametrize("mode", MODES)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Aggregation.


def naive_agg(loss, mask, mode) -> float:
    rows = [
        [x for x, m in zip(row, bits, strict=True) if m]
        for row, bits in zip(loss.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    sums = [math.fsum(row) for row in rows]
    return {
        "token-mean": math.fsum(sums) / sum(map(len, rows)),
        "token-sum": math.fsum(sums),
        "seq-mean-token-sum": math.fsum(sums) / len(rows),
        "seq-mean-token-sum-norm": math.fsum(sums) / len(rows) / BUDGET,
        "seq-mean-token-mean": math.fsum(
            total / len(row) for total, row in zip(sums, rows, strict=True)
        ) / len(rows),
    }[mode]  # fmt: skip


@all_modes
@settings(deadline=None, max_examples=60)
@given(mask=masks())
def test_aggregation_equals_a_naive_loop(mode, mask):
    loss = noise(*mask.shape)
    found = agg_loss(loss, mask, mode, loss_scale_factor=BUDGET).item()
    assert found == pytest.approx(naive_agg(loss, mask, mode), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 10 / 3), ("token-sum", 10.0), ("seq-mean-token-sum", 5.0),
     ("seq-mean-token-mean", 4.0), ("seq-mean-token-sum-norm", 5.0 / BUDGET)],
)  # fmt: skip
def test_aggregation_by_hand(mode, expected):
    loss = torch.tensor([[1.0, 3.0, 9.0], [9.0, 6.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    found = agg_loss(loss, mask, mode, loss_scale_factor=BUDGET)
    assert found.item() == pytest.approx(expected)


@all_modes
def test_a_batch_in_which_nothing_is_trained_has_loss_and_gradient_zero(mode):
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    found = agg_loss(loss, torch.zeros(2, 3), mode, loss_scale_factor=BUDGET)
    found.backward()
    assert found.item() == 0.0
    assert loss.grad is not None
    assert not loss.grad.any()


@all_modes
@settings(deadline=None, max_examples=60)
@given(mask=masks(), data=st.data())
def test_law_8_masked_tokens_and_rows_change_no_loss_and_no_gradient(mode, mask, data):
    loss = noise(*mask.shape).requires_grad_()
    rows, width = mask.shape
    places = torch.stack(
        [
            torch.tensor(sorted(data.draw(st.permutations(range(width + 3)))[:width]))
            for _ in range(rows)
        ]
    )
    wide = torch.full((rows, width + 3), torch.inf, dtype=torch.float64).scatter(1, places, loss)
    bits = torch.zeros(rows, width + 3, dtype=mask.dtype).scatter(1, places, mask)
    wide, bits = (
        torch.nn.functional.pad(wide, (0, 0, 0, 2)),
        torch.nn.functional.pad(bits, (0, 0, 0, 2)),
    )
    before = agg_loss(loss, mask, mode, loss_scale_factor=BUDGET)
    after = agg_loss(wide, bits, mode, loss_scale_factor=BUDGET)
    torch.testing.assert_close(after, before)
    one, other = (torch.autograd.grad(value, loss)[0] for value in (before, after))
    torch.testing.assert_close(one, other)


@st.composite
def layouts(draw, num_rows: int) -> list[list[list[int]]]:
    """Rows dealt to ranks, and on each rank to micro-batches (some of them empty of rows)."""
    ranks: list[list[list[int]]] = [[[], []] for _ in range(draw(st.integers(1, 3)))]
    for row in draw(st.permutations(range(num_rows))):
        draw(st.sampled_from(draw(st.sampled_from(ranks)))).append(row)
    return ranks


@all_modes
@settings(deadline=None, max_examples=60)
@given(mask=masks(), data=st.data())
def test_law_10_micro_batches_and_ranks_change_no_loss_and_no_gradient(mode, mask, data):
    log_prob = (noise(*mask.shape) - 1).requires_grad_()
    old, advantages = noise(*mask.shape, seed=1) - 1, noise(*mask.shape, seed=2)
    weights = noise(*mask.shape, seed=3).exp()
    function = get_policy_loss_fn("vanilla")
    whole = LossScale.of(mask, loss_scale_factor=BUDGET)
    expected, metrics = function(
        old, log_prob, advantages, mask, mode, rollout_is_weights=weights, scale=whole
    )
    ranks = data.draw(layouts(len(mask)))
    scale = LossScale.of(mask, dp_size=len(ranks), loss_scale_factor=BUDGET)
    total, found = 0.0, dict.fromkeys(metrics, 0.0)
    for micro_batches in ranks:
        for rows in micro_batches:
            loss, parts = function(
                old[rows], log_prob[rows], advantages[rows], mask[rows], mode,
                rollout_is_weights=weights[rows], scale=scale,
            )  # fmt: skip
            total = total + loss / len(ranks)  # FSDP2 averages over ranks
            found = {name: found[name] + parts[name] for name in found}
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(found, metrics)
    one, other = (torch.autograd.grad(value, log_prob)[0] for value in (expected, total))
    torch.testing.assert_close(other, one)


@settings(deadline=None, max_examples=60)
@given(mask=masks())
def test_law_10_without_a_scale_the_rows_are_the_whole_mini_batch(mask):
    old, new, advantages = (noise(*mask.shape, seed=seed) for seed in range(3))
    alone = compute_policy_loss_vanilla(old, new, advantages, mask)
    told = compute_policy_loss_vanilla(old, new, advantages, mask, scale=LossScale.of(mask))
    torch.testing.assert_close(alone, told)


def test_the_norm_mode_does_not_depend_on_the_padded_length():
    with pytest.raises(ConfigError, match="response budget"):
        agg_loss(torch.ones(1, 3), torch.ones(1, 3), "seq-mean-token-sum-norm")


def test_several_ranks_need_the_count_that_their_mode_divides_by():
    ones = torch.ones(1, 3)
    with pytest.raises(ConfigError, match="2 ranks"):
        agg_loss(ones, ones, "token-mean", dp_size=2, global_batch_size=2)
    assert agg_loss(ones, ones, "token-mean", dp_size=2, batch_num_tokens=6).item() == 1.0
    assert agg_loss(ones, ones, "token-sum", dp_size=2).item() == 6.0


def test_an_unknown_mode_names_the_known_ones():
    with pytest.raises(ConfigError, match="seq-mean-token-sum-norm"):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "mean")


def test_masked_sums_and_means_ignore_what_is_masked():
    values, mask = torch.tensor([1.0, torch.nan, 4.0]), torch.tensor([1, 0, 1])
    assert masked_sum(values, mask).item() == 5.0
    assert masked_mean(values, mask).item() == 2.5
    assert masked_mean(values, torch.zeros(3)).item() == 0.0


# The vanilla loss.


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [(1.0, 2.0, -2.0, 0, 0), (1.5, 1.0, -1.3, 1, 0), (0.5, 1.0, -0.5, 0, 0),
     (0.5, -1.0, 0.9, 1, 0), (1.5, -1.0, 1.5, 0, 0), (4.0, -2.0, 6.0, 0, 1),
     (0.95, -1.0, 0.95, 0, 0)],
)  # fmt: skip
def test_vanilla_by_hand(ratio, advantage, loss, clipped, lower):
    """Clips 0.1 below and 0.3 above, dual clip 3."""
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3)
    log_prob = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    zero, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    found, metrics = compute_policy_loss_vanilla(zero, log_prob, advantages, mask, config=config)
    assert found.item() == pytest.approx(loss)
    assert metrics["actor/pg_clipfrac"].item() == clipped
    assert metrics["actor/pg_clipfrac_lower"].item() == lower
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(ratio))


def test_one_clip_stands_for_both():
    log_prob, zero = torch.tensor([[1.0]]), torch.zeros(1, 1)
    found, _ = compute_policy_loss_vanilla(
        zero, log_prob, torch.ones(1, 1), torch.ones(1, 1), config=ActorConfig(clip_ratio=0.5)
    )
    assert found.item() == pytest.approx(-1.5)


@all_modes
def test_gradient_of_vanilla_equals_central_differences(mode):
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    old, advantages = noise(3, 4, seed=1), noise(3, 4, seed=2)
    start = old + 0.4 * noise(3, 4, seed=3)
    scale = LossScale.of(mask, loss_scale_factor=BUDGET)

    def loss(log_prob):
        return compute_policy_loss_vanilla(old, log_prob, advantages, mask, mode, scale=scale)[0]

    assert torch.autograd.gradcheck(loss, start.requires_grad_())


def test_importance_weights_multiply_each_token_s_loss():
    mask, ones = torch.tensor([[1, 1, 0]]), torch.ones(1, 3)
    weights = torch.tensor([[0.5, 2.0, torch.nan]])
    found, _ = compute_policy_loss_vanilla(
        ones, ones, torch.tensor([[1.0, 3.0, 1.0]]), mask, "token-sum", rollout_is_weights=weights
    )
    assert found.item() == -6.5


def test_law_8_not_even_nan_on_masked_tokens_reaches_the_gradient():
    log_prob = torch.tensor([[-1.0, torch.nan, -torch.inf]], requires_grad=True)
    spoiled = torch.tensor([[-1.0, torch.nan, torch.inf]])
    loss, metrics = compute_policy_loss_vanilla(
        spoiled, log_prob, spoiled, torch.tensor([[1, 0, 0]])
    )
    loss.backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[1.0, 0.0, 0.0]]
    assert all(torch.isfinite(value) for value in metrics.values())


def test_log_ratios_are_clamped_and_zero_where_masked():
    new, old = torch.tensor([0.0, -90.0, torch.nan]), torch.tensor([-90.0, 0.0, 0.0])
    assert clamped_log_ratio(new, old, torch.tensor([1, 1, 0])).tolist() == [20.0, -20.0, 0.0]


def test_a_huge_ratio_stays_finite():
    found, _ = compute_policy_loss_vanilla(
        torch.full((1, 1), -1000.0), torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1)
    )
    assert found.item() == 3.0


def test_a_loss_of_ten_lines_is_found_by_name():
    @register_policy_loss("reinforce-of-a-test")
    def compute_reinforce_loss(
        old_log_prob, log_prob, advantages, response_mask,
        loss_agg_mode="token-mean", config=None, rollout_is_weights=None, *, scale=None,
    ):  # fmt: skip
        scale = scale or LossScale.of(response_mask)
        return scale.aggregate(-advantages * log_prob, response_mask, loss_agg_mode), {}

    function = get_policy_loss_fn("reinforce-of-a-test")
    ones = torch.ones(1, 2)
    assert function(ones, -ones, ones, ones, scale=LossScale.of(ones))[0].item() == 1.0


def test_a_loss_that_takes_no_scale_is_refused():
    with pytest.raises(ConfigError, match="takes no `scale`"):
        register_policy_loss("bad-of-a-test")(lambda old_log_prob, log_prob: (log_prob, {}))
    with pytest.raises(ConfigError, match="did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")


# KL.


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
