import math

import pytest
import torch

from agentrl.algorithms import (
    LossScale,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
)
from agentrl.algorithms.losses.covariance import cut_for_clip_cov
from agentrl.algorithms.losses.registry import TrainedTokens
from agentrl.config.schema.training import ActorConfig
from agentrl.errors import ConfigError
from tests.fakes.loss_rows import call, column, log


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [(1.0, 2.0, -2.0, 0, 0), (1.5, 1.0, -1.3, 1, 0), (0.5, 1.0, -0.5, 0, 0),
     (0.5, -1.0, 0.9, 1, 0), (1.5, -1.0, 1.5, 0, 0), (4.0, -2.0, 6.0, 0, 1),
     (0.95, -1.0, 0.95, 0, 0)],
)  # fmt: skip
def test_vanilla_by_hand(ratio, advantage, loss, clipped, lower):
    """Clips 0.1 below and 0.3 above, dual clip 3."""
    found, metrics = call("vanilla", column(0), log(ratio), column(advantage))
    assert found.item() == pytest.approx(loss)
    assert metrics["actor/pg_clipfrac"].item() == clipped
    assert metrics["actor/pg_clipfrac_lower"].item() == lower
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(ratio))


def test_one_clip_ratio_sets_both_bounds():
    found, _ = compute_policy_loss_vanilla(
        column(0), column(1), column(1), column(1), config=ActorConfig(clip_ratio=0.5)
    )
    assert found.item() == pytest.approx(-1.5)


@pytest.mark.parametrize("name", ["dr_grpo", "bnpo"])
def test_losses_of_trl_have_no_dual_clip(name):
    found, _ = call(name, column(0, 0), log(4, 0.5), column(-2, -1))
    assert found.item() == pytest.approx(8.9)


def test_dr_grpo_divides_by_sequences_and_budget_bnpo_by_tokens():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    scale = LossScale.of(mask, loss_scale_factor=10)
    for name, expected in (("dr_grpo", -4 / 2 / 10), ("bnpo", -1.0), ("luspo", -2.0)):
        found, _ = get_policy_loss_fn(name)(zeros, zeros, ones, mask, scale=scale)
        assert found.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "loss", "dropped", "cut"),
    [(0.5, 0.8, 1.0, 0.0, 1, 0), (0.5, 0.6, 1.0, -1.2 * math.log(0.6), 0, 0),
     (0.5, 0.8, -1.0, 1.6 * math.log(0.8), 0, 0), (0.5, 0.35, -1.0, 0.0, 1, 0),
     (0.01, 0.1, 2.0, -6 * math.log(0.1), 0, 1)],
)  # fmt: skip
def test_dppo_tv_by_hand(old, new, advantage, loss, dropped, cut):
    """Probabilities may fall by 0.1 and rise by 0.25; ratios count up to 3."""
    found, metrics = call("dppo_tv", log(old), log(new), column(advantage), clip_ratio_high=0.25)
    assert found.item() == pytest.approx(loss)
    assert metrics["actor/pg_clipfrac"].item() == dropped
    assert metrics["actor/pg_clipfrac_lower"].item() == cut


@pytest.mark.parametrize(
    ("old", "new", "advantage", "dropped"),
    [(0.5, 0.8, 1.0, 1), (0.5, 0.8, -1.0, 0), (0.5, 0.7, 1.0, 0), (0.5, 0.2, -1.0, 1),
     (0.5, 0.2, 1.0, 0), (0.5, 0.3, -1.0, 0)],
)  # fmt: skip
def test_dppo_kl_by_hand(old, new, advantage, dropped):
    """KL(0.5, 0.8) = KL(0.5, 0.2) = 0.223; KL(0.5, 0.7) = KL(0.5, 0.3) = 0.087; bound 0.2."""
    found, metrics = call(
        "dppo_kl", log(old), log(new), column(advantage), clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    kept = 0.0 if dropped else -advantage * new / old * math.log(new)
    assert found.item() == pytest.approx(kept)
    assert metrics["actor/pg_clipfrac"].item() == dropped


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "clipped"),
    [((2.0, 0.5), 1.0, -1.0, 0), ((4.0, 1.0), 1.0, -1.3, 1), ((4.0, 1.0), -1.0, 2.0, 0),
     ((0.25, 1.0), -1.0, 0.9, 1)],
)  # fmt: skip
def test_gspo_by_hand(ratios, advantage, loss, clipped):
    """The ratio of the sequence is the geometric mean: 1, 2, 2, 0.5."""
    advantages = column(advantage, advantage)
    found, metrics = call("gspo", column(0, 0), log(*ratios), advantages, "seq-mean-token-mean")
    assert found.item() == pytest.approx(loss)
    assert metrics["actor/pg_clipfrac"].item() == clipped


def test_luspo_is_gspo_times_the_length():
    gspo, _ = call("gspo", column(0, 0), log(1.2, 1), column(1, 1), "seq-mean-token-mean")
    luspo, _ = call("luspo", column(0, 0), log(1.2, 1), column(1, 1), "seq-mean-token-sum")
    assert luspo.item() == pytest.approx(2 * gspo.item())


def test_geo_mean_by_hand():
    """Log-ratios 1 and -0.2: where A > 0 the first is cut to 0.3, where A < 0 the second to -0.1.

    Then exp(0.05) and exp(0.45)."""
    for sign, loss, above, below in ((1, -math.exp(0.05), 1.0, 0), (-1, math.exp(0.45), 0, 1.0)):
        found, metrics = call(
            "geo_mean", column(0, 0), column(1, -0.2), column(sign, sign), "seq-mean-token-mean"
        )
        assert found.item() == pytest.approx(loss)
        assert metrics["actor/pg_clipfrac"].item() == above
        assert metrics["actor/pg_clipfrac_lower"].item() == below


def test_sapo_by_hand():
    """Sigmoid(0) = 1/2 at ratio 1; sigmoid(1) = 0.731 at ratio 2 with tau 1."""
    found, _ = call("sapo", column(0), column(0), column(3), tau_pos=0.5)
    assert found.item() == pytest.approx(-3 * 4 / 0.5 / 2)
    found, _ = call("sapo", column(0), column(0), column(-3), tau_neg=2.0)
    assert found.item() == pytest.approx(3 * 4 / 2 / 2)
    found, _ = call("sapo", column(0), log(2), column(1))
    assert found.item() == pytest.approx(-4 * 0.7310585786)


def test_vespo_by_hand():
    """W = 2 x 1 = 2: phi = 2^2 exp(3 (1 - 2)) where A >= 0, 2^3 exp(2 (1 - 2)) where A < 0."""
    old, new = column(-2, -1), column(-2 + math.log(2), -1)
    summed = math.log(2) - 3
    found, metrics = call("vespo", old, new, column(1, 1))
    assert found.item() == pytest.approx(-4 * math.exp(-3) * summed)
    assert metrics["actor/vespo_phi"].item() == pytest.approx(4 * math.exp(-3))
    found, _ = call("vespo", old, new, column(-1, -1))
    assert found.item() == pytest.approx(8 * math.exp(-2) * summed)
    found, _ = call("vespo", old, old, column(1, 1))
    assert found.item() == pytest.approx(3.0)


def test_gpg_by_hand():
    found, _ = call("gpg", column(0, 0), column(-1, -2), column(3, -4))
    assert found.item() == pytest.approx(3 - 8)


def test_cispo_by_hand():
    """Ratios 2 and 0.5 count 1.3 and 0.9, 1.1 counts itself."""
    old = column(-2, -2, -2)
    found, metrics = call("cispo", old, old + log(2, 0.5, 1.1), column(1, 1, -1))
    first, second, third = ((old + log(2, 0.5, 1.1)).squeeze(0)).tolist()
    assert found.item() == pytest.approx(-1.3 * first - 0.9 * second + 1.1 * third)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 3)


def test_dro_by_hand():
    found, _ = call(
        "dro", column(-1), column(-3), column(2), policy_loss={"loss_mode": "dro", "dro_beta": 0.5}
    )
    assert found.item() == pytest.approx(6 + 0.25 * 4)


def test_clip_cov_by_hand():
    """Means -2 and 0: covariances 1 x 2, 1 x 1, -1 x -1, -1 x -2 = 2, 1, 1, 2.

    Between 0.5 and 1.5 lie two; a share of 1/4 is one token, and half of it is each of the two."""
    old, advantages = column(-1, -1, -3, -3), column(2, 1, -1, -2)
    own = {"clip_cov_ratio": 0.25, "clip_cov_lb": 0.5, "clip_cov_ub": 1.5}
    found, metrics = call("clip_cov", old, old, advantages, policy_loss=own)
    assert found.item() == pytest.approx(-2 - 1 / 2 + 1 / 2 + 2)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(0.25)
    found, _ = call("clip_cov", old, old, column(3, 1, -1, -3), policy_loss=own)
    assert found.item() == pytest.approx(-3 + 3)


def test_clip_cov_without_a_token_between_the_bounds_is_the_clipped_loss():
    old, new = column(-1, -3), column(-0.5, -3)
    own = {"clip_cov_lb": 50.0, "clip_cov_ub": 60.0}
    found, metrics = call("clip_cov", old, new, column(1, -1), policy_loss=own)
    assert found.item() == pytest.approx(-1.3 + 1)
    assert metrics["actor/pg_clipfrac"].item() == 0.0


def test_kl_cov_by_hand():
    """Means -2 and 0: covariances 3, 1, -1, -1; half of the tokens are two."""
    old, advantages = column(-1, -1, -3, -3), column(3, 1, 1, -5)
    own = {"kl_cov_ratio": 0.5, "ppo_kl_coef": 0.1}
    assert cut_for_clip_cov(TrainedTokens(old[0], advantages[0]), ActorConfig()).mean_log_prob == -2
    new = old + log(2, 1, 0.5, 1)
    found, metrics = call("kl_cov", old, new, advantages, policy_loss=own)
    # Covariances are 3, 1, -1, 5: the first and the last.
    penalty = 0.1 * math.log(2)
    assert found.item() == pytest.approx(-6 - 1 - 0.5 + 5 + penalty)
    assert metrics["actor/kl_cov_frac"].item() == 0.5
    assert metrics["actor/ppo_kl_abs"].item() == pytest.approx(2 * math.log(2) / 4)


def test_bypass_with_ppo_clip_is_vanilla_without_weights():
    old, new, advantages = column(-1, -2, -1), column(-0.9, -1, -3), column(1, 2, -1)
    rules = {"rollout_is": "token", "loss_type": "ppo_clip"}
    bypass, _ = call("bypass_mode", old, new, advantages, policy_loss={"rollout_correction": rules})
    vanilla, _ = call("vanilla", old, new, advantages)
    assert bypass.item() == vanilla.item()


def test_bypass_with_reinforce_weighs_and_rejects_under_the_current_policy():
    """Ratios 3, 1.5, 0.1: weights are cut to 2, and beyond 0.2 to 5 a token is left out."""
    old, advantages = column(-4, -4, -1), column(1, 1, 1)
    new = old + log(3, 1.5, 0.1)
    rules = {
        "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0,
        "rollout_rs": "token_k1", "rollout_rs_threshold": "0.2_5.0",
    }  # fmt: skip
    own = {"rollout_correction": rules}
    found, metrics = call("bypass_mode", old, new, advantages, "token-mean", policy_loss=own)
    expected = -(2 * (math.log(3) - 4) + 1.5 * (math.log(1.5) - 4)) / 3
    assert found.item() == pytest.approx(expected, rel=1e-6)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].item() == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_mean"].item() == pytest.approx(3.6 / 3)


def test_the_bypass_does_not_normalise_what_it_sees_in_parts():
    rules = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    with pytest.raises(ConfigError, match="rollout_is_batch_normalize"):
        call(
            "bypass_mode",
            column(0),
            column(0),
            column(1),
            policy_loss={"rollout_correction": rules},
        )
