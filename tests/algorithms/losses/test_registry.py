from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from agentrl.algorithms import (
    LossScale,
    effective_loss_agg_mode,
    get_policy_loss_fn,
    needs_summary,
    policy_loss_names,
    register_policy_loss,
    with_summary,
)
from agentrl.config.schema.training import ActorConfig, LossAggMode
from agentrl.config.tables import method_facts
from agentrl.errors import ConfigError
from tests.fakes.loss_rows import call, column
from tests.fakes.naive_losses import RAGGED, make_batch

MODES = list(get_args(LossAggMode))


# Losses by name, and what a name prescribes.


def test_the_ten_lines_of_the_page_are_a_loss_that_is_found_by_name():
    page = Path(__file__).parents[3] / "docs" / "algorithms" / "policy_losses.md"
    example = page.read_text().split("```python\n")[1].split("```")[0]
    assert len(example.strip().splitlines()) <= 10 + 2  # and two imports
    exec(example.replace('"reinforce"', '"reinforce-of-a-test"'))
    ones, weights = torch.ones(1, 2), torch.tensor([[3.0, 1.0]])
    found, _ = get_policy_loss_fn("reinforce-of-a-test")(
        ones, -ones, ones, ones, rollout_is_weights=weights, scale=LossScale.of(ones)
    )
    assert found.item() == 2.0


def test_a_loss_that_takes_no_scale_is_refused():
    with pytest.raises(ConfigError, match="takes no `scale`"):
        register_policy_loss("bad-of-a-test")(lambda old_log_prob, log_prob: (log_prob, {}))
    with pytest.raises(ConfigError, match="did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")


def test_a_loss_may_prescribe_its_aggregation():
    chosen = {
        name: effective_loss_agg_mode(ActorConfig.model_validate({"policy_loss": name}))
        for name in ("vanilla", "dr_grpo", "bnpo", "luspo", "sapo_verl", "sapo")
    }
    assert chosen == {
        "vanilla": "token-mean", "dr_grpo": "seq-mean-token-sum-norm", "bnpo": "token-mean",
        "luspo": "seq-mean-token-sum", "sapo_verl": "seq-mean-token-mean", "sapo": "token-mean",
    }  # fmt: skip


def test_the_configuration_knows_which_losses_prescribe_their_aggregation():
    prescribed = {}
    for name in policy_loss_names():
        config = ActorConfig.model_validate({"policy_loss": {"loss_mode": name, "dro_beta": 1.0}})
        modes = {
            effective_loss_agg_mode(config.model_copy(update={"loss_agg_mode": mode}))
            for mode in MODES
        }
        prescribed |= {name: modes.pop()} if len(modes) == 1 else {}
    fixed = {name: facts.aggregation for name, facts in method_facts().losses.items()}
    assert prescribed == {name: mode for name, mode in fixed.items() if mode}


def test_a_loss_by_covariance_wants_a_summary_of_the_mini_batch():
    batch, config = make_batch(RAGGED), ActorConfig.model_validate({"policy_loss": "kl_cov"})
    assert needs_summary(config)
    assert not needs_summary(ActorConfig())
    with pytest.raises(ConfigError, match="whole mini-batch"):
        get_policy_loss_fn("kl_cov")(
            batch.old, batch.new, batch.advantages, RAGGED, scale=LossScale.of(RAGGED)
        )


def test_a_scale_needs_no_summary_for_most_losses():
    scale = LossScale.of(RAGGED)
    assert with_summary(scale, [], ActorConfig()) is scale


def test_dro_needs_its_weight():
    with pytest.raises(ValidationError, match="dro_beta"):
        ActorConfig.model_validate({"policy_loss": "dro"})
    with pytest.raises(ConfigError, match=r"actor\.policy_loss\.dro_beta"):
        call("dro", column(0), column(0), column(1))


# What the reference does, by name.


def test_the_reference_s_sapo_is_deaf_to_the_mode():
    batch = make_batch(RAGGED)
    args = (batch.old, batch.new, batch.advantages, RAGGED)
    expected, _ = get_policy_loss_fn("sapo")(*args, "seq-mean-token-mean")
    for mode in MODES:
        assert get_policy_loss_fn("sapo_verl")(*args, mode)[0].item() == expected.item()


def test_the_reference_s_geo_mean_counts_rows_that_train_on_nothing():
    batch = make_batch(RAGGED)
    args = (batch.old, batch.new, batch.advantages, RAGGED, "seq-mean-token-mean")
    ours, theirs = (get_policy_loss_fn(n)(*args)[0].item() for n in ("geo_mean", "geo_mean_verl"))
    assert theirs == pytest.approx(ours * 3 / 4)


def test_the_reference_s_clip_cov_draws_between_the_bounds():
    old, advantages = column(-1, -1, -3, -3), column(2, 1, -1, -2)
    own = {"clip_cov_ratio": 0.25, "clip_cov_lb": 0.5, "clip_cov_ub": 1.5}
    found = {
        round(call("clip_cov_verl", old, old, advantages, policy_loss=own)[0].item(), 6)
        for _ in range(40)
    }
    assert found == {-2 - 1 + 2 + 1 + 1.0, -2 - 1 + 2 + 1 - 1.0}


def test_the_reference_s_kl_cov_looks_at_the_current_log_probabilities():
    """Before the update the first token has the highest covariance, now it is the third."""
    own = {"kl_cov_ratio": 0.5, "ppo_kl_coef": 1.0}
    (ours, _), (theirs, _) = (
        call(name, column(-1, -2, -9), column(-9, -2, -3), column(5, 0, 1), policy_loss=own)
        for name in ("kl_cov", "kl_cov_verl")
    )
    assert ours.item() == pytest.approx(theirs.item() + 8 - 6)
