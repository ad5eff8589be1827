"""Several rewards, each normalised apart. Its invariants: `test_invariants.py`."""

import numpy as np
import pytest
import torch

from agentrl.config.schema.training import AlgorithmConfig
from agentrl.errors import ConfigError
from tests.fakes.group_rows import (
    advantages_of,
    assert_rows,
    hand_made,
    mean_of,
    naive,
    naive_whitened,
    std_of,
)

KEYS = ("format", "accuracy")
FORMAT, ACCURACY = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 9.0, 4.0, 2.0, 0.0]


def gdpo_settings(weights=(), **columns) -> dict:
    config = AlgorithmConfig(gdpo_reward_keys=KEYS, gdpo_reward_weights=weights)
    return {"config": config, "non_tensor_batch": columns}


def as_dicts(**rewards) -> np.ndarray:
    rows = zip(*rewards.values(), strict=True)
    return np.array([dict(zip(rewards, row, strict=True)) for row in rows], dtype=object)


BOTH = {"format": np.array(FORMAT), "accuracy": np.array(ACCURACY)}


@pytest.mark.parametrize("divide", [True, False])
def test_gdpo_equals_a_loop_over_rows_and_rewards(divide):
    rows, weights = hand_made(), (0.25, 2.0)
    total = [0.0] * 6
    for weight, reward in zip(weights, (FORMAT, ACCURACY), strict=True):
        one = hand_made(reward)
        part = naive(one, lambda m, g: (m.score - mean_of(g)) / (std_of(g) + 1e-6 if divide else 1))
        total = [old + weight * new for old, new in zip(total, part, strict=True)]
    found = advantages_of(
        "gdpo", rows, norm_adv_by_std_in_grpo=divide, **gdpo_settings(weights, **BOTH)
    )
    assert_rows(rows, found, naive_whitened(rows, total))


def test_gdpo_reads_the_scorer_s_dicts_and_prefers_them():
    by_column = advantages_of("gdpo", hand_made(), **gdpo_settings(**BOTH))
    dicts = as_dicts(format=FORMAT, accuracy=ACCURACY, other=["x"] * 6)
    columns = {"reward_extra_info": dicts, "format": np.array(["a column of the data"] * 6)}
    assert torch.equal(advantages_of("gdpo", hand_made(), **gdpo_settings(**columns)), by_column)


def test_gdpo_weighs_rewards_equally_by_default():
    plain = advantages_of("gdpo", hand_made(), **gdpo_settings(**BOTH))
    assert torch.equal(
        plain, advantages_of("gdpo", hand_made(), **gdpo_settings((1.0, 1.0), **BOTH))
    )
    weighed = advantages_of("gdpo", hand_made(), **gdpo_settings((1.0, 0.1), **BOTH))
    assert not torch.allclose(plain, weighed)


def test_gdpo_trains_on_a_group_in_which_one_of_two_rewards_differs():
    columns = {"format": np.array(FORMAT), "accuracy": np.array([7.7] * 3 + [1.0, 2.0, 3.0])}
    found = advantages_of("gdpo", hand_made([1.0] * 6), **gdpo_settings(**columns))
    assert found[:3, 0].all()  # the scores are equal, the formats are not


def test_gdpo_without_a_configuration_normalises_the_score():
    rows = hand_made()
    scores = naive(rows, lambda m, g: (m.score - mean_of(g)) / (std_of(g) + 1e-6))
    assert_rows(rows, advantages_of("gdpo", rows), naive_whitened(rows, scores))


def test_gdpo_needs_no_rewards_of_a_row_that_does_not_count():
    rows = hand_made()._replace(in_baseline=torch.tensor([True] * 5 + [False]))
    dicts = as_dicts(format=FORMAT, accuracy=ACCURACY)
    dicts[5] = {}
    found = advantages_of("gdpo", rows, **gdpo_settings(reward_extra_info=dicts))
    assert found[:5].any(dim=-1).all()
    assert not found[5].any()
    dicts[5] = None
    assert torch.equal(advantages_of("gdpo", rows, **gdpo_settings(reward_extra_info=dicts)), found)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"format": np.array(FORMAT)}, "no row has the reward 'accuracy'"),
        ({**BOTH, "accuracy": np.array(["good"] * 6)}, "'accuracy' is not a number"),
        ({**BOTH, "accuracy": np.array([np.nan] * 6)}, "'accuracy' is missing.* in 6 rows"),
        (
            {"reward_extra_info": np.array([{"format": 1, "accuracy": 1}] + [{"format": 1}] * 5)},
            "'accuracy' is missing.* in 5 rows",
        ),
    ],
)
def test_gdpo_names_a_reward_that_is_not_there(columns, message):
    with pytest.raises(ConfigError, match=message):
        advantages_of("gdpo", hand_made(), **gdpo_settings(**columns))


def test_gdpo_wants_keys_and_a_weight_for_each():
    with pytest.raises(ConfigError, match="has no rewards"):
        advantages_of("gdpo", hand_made(), config=AlgorithmConfig(), non_tensor_batch=BOTH)
    with pytest.raises(ConfigError, match="1 weights for 2 rewards"):
        advantages_of("gdpo", hand_made(), **gdpo_settings((1.0,), **BOTH))
