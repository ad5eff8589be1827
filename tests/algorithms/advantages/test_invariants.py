"""A failed request is data, 8, 9 and 10 of every bundled advantage estimator, through
`compute_advantage`.

The estimators named `<estimator>_verl` do as the reference does, and keep no invariant.
"""

import inspect
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import compute_advantage, get_adv_estimator_fn
from agentrl.algorithms.advantages.registry import adv_estimator_names
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.protocol import DataProto

BUNDLED = [
    name
    for name in adv_estimator_names()
    if get_adv_estimator_fn(name).__module__.startswith("agentrl.") and not name.endswith("_verl")
]
BY_GROUP = [
    name for name in BUNDLED if "index" in inspect.signature(get_adv_estimator_fn(name)).parameters
]
WHITENED = [name for name in BUNDLED if name not in BY_GROUP and name != "remax"]
KEYS = ("format", "accuracy")

every = pytest.mark.parametrize("name", BUNDLED)
every_by_group = pytest.mark.parametrize("name", BY_GROUP)
seeds = st.integers(0, 2**31)
few = settings(deadline=None, max_examples=10)


class Batch(NamedTuple):
    """A batch with all that any estimator wants."""

    tensors: dict[str, torch.Tensor]
    objects: dict[str, np.ndarray]

    def rows(self, which: torch.Tensor) -> "Batch":
        return Batch(
            {key: value[which] for key, value in self.tensors.items()},
            {key: value[which.numpy()] for key, value in self.objects.items()},
        )

    @property
    def mask(self) -> torch.Tensor:
        return self.tensors["response_mask"].bool()

    @property
    def counted(self) -> torch.Tensor:
        return self.tensors["in_baseline"] & self.mask.any(dim=-1)


FILLS = {  # what stands on a masked token: nothing that an estimator may see
    "token_level_rewards": torch.nan,
    "token_level_scores": torch.nan,
    "values": torch.nan,
    "old_log_probs": torch.nan,
    "sum_pi_squared": torch.nan,
    "rollout_is_weights": torch.nan,
    "response_mask": 0,
    "turn_ids": 77,
    "state_ids": 88,
}


def make_batch(seed: int, name: str) -> Batch:
    """Rows with observations anywhere, some without a trained token; rewards are exact eighths."""
    draw = np.random.default_rng(seed)
    num_rows, width = int(draw.integers(2, 9)), int(draw.integers(2, 9))
    mask = torch.from_numpy(draw.random((num_rows, width)) < 0.65).long()
    mask[torch.from_numpy(draw.random(num_rows) < 0.15)] = 0

    def eighths(low: int, high: int) -> torch.Tensor:
        return torch.from_numpy(draw.integers(low, high, (num_rows, width))).float() / 8

    rewards = eighths(0 if name == "maxrl" else -8, 9) * eighths(0, 9).gt(0.5)
    turn_ids = torch.nn.functional.pad(mask.diff(dim=-1).abs(), (1, 0)).cumsum(dim=-1)
    first_states = torch.from_numpy(draw.integers(0, 3, (num_rows, width + 1)))
    tensors = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "turn_ids": turn_ids,
        "state_ids": torch.where(mask.bool(), first_states.gather(1, turn_ids), -1),
        "values": eighths(-8, 9),
        "old_log_probs": -eighths(1, 25),
        "sum_pi_squared": eighths(1, 8),
        "rollout_is_weights": eighths(4, 17),
        "reward_baselines": eighths(-8, 9)[:, 0],
        "in_baseline": torch.from_numpy(draw.random(num_rows) < 0.8),
    }
    scorer = [dict(zip(KEYS, draw.integers(0, 3, 2).tolist(), strict=True)) for _ in mask]
    objects = {"uid": draw.choice(["a", "b"], num_rows), "reward_extra_info": np.array(scorer)}
    return blank_masked(Batch(tensors, {key: v.astype(object) for key, v in objects.items()}))


def blank_masked(batch: Batch) -> Batch:
    """Zeros on masked tokens, as an honest batch has there."""
    zeroed = {
        key: torch.where(batch.mask, value, 0) if FILLS.get(key) is torch.nan else value
        for key, value in batch.tensors.items()
    }
    return batch._replace(tensors=zeroed)


def compute(name: str, batch: Batch, gamma: float = 0.5) -> torch.Tensor:
    """Advantages and returns, `[2, B, T]`."""
    config = AlgorithmConfig(adv_estimator=name, gamma=gamma, lam=0.5, gdpo_reward_keys=KEYS)
    tensors = {key: value.clone() for key, value in batch.tensors.items()}
    data = DataProto.from_dict(tensors, {key: list(v) for key, v in batch.objects.items()})
    done = compute_advantage(data, config).batch
    return torch.stack([done["advantages"], done["returns"]])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def insert_masked(batch: Batch, seed: int, count: int = 4) -> tuple[Batch, torch.Tensor]:
    """Put masked tokens anywhere, each row its own places. Returns where the old tokens are now."""
    num_rows, width = batch.mask.shape
    order = np.random.default_rng(seed).random((num_rows, width + count)).argsort(axis=1)
    places = torch.from_numpy(np.sort(order[:, :width], axis=1))

    def widen(key: str, value: torch.Tensor) -> torch.Tensor:
        if key not in FILLS:
            return value
        return value.new_full((num_rows, width + count), FILLS[key]).scatter(1, places, value)

    return batch._replace(
        tensors={key: widen(key, value) for key, value in batch.tensors.items()}
    ), places


def test_the_bundled_estimators_are_all_here():
    assert {"gae", "grpo", "rloo", "maxrl", "gdpo", "turn_gae", "gigpo", "remax"} <= {*BUNDLED}
    assert {"grpo", "gdpo", "turn_rloo", "gigpo"} <= {*BY_GROUP}


@every
@few
@given(seed=seeds, where=seeds)
def test_observations_are_invisible_inserted_masked_tokens_change_nothing(name, seed, where):
    batch = make_batch(seed, name)
    wider, places = insert_masked(batch, where)
    found = compute(name, wider)
    assert_same(found.gather(2, places.expand(2, -1, -1)), compute(name, batch))
    assert not found[:, ~wider.mask].any()


@every
@few
@given(seed=seeds)
def test_observations_are_invisible_values_on_masked_tokens_are_ignored(name, seed):
    batch = make_batch(seed, name)
    spoiled = {
        key: torch.where(batch.mask, value, FILLS[key]) if key in FILLS else value
        for key, value in batch.tensors.items()
    }
    assert torch.equal(compute(name, batch._replace(tensors=spoiled)), compute(name, batch))


@every
@few
@given(seed=seeds)
def test_observations_are_invisible_a_row_in_which_nothing_is_trained_changes_nothing(name, seed):
    batch = make_batch(seed, name)
    kept = batch.mask.any(dim=-1)
    found = compute(name, batch)
    assert not found[:, ~kept].any()
    if kept.any():
        assert_same(found[:, kept], compute(name, batch.rows(kept)))


@every_by_group
@few
@given(seed=seeds)
def test_failures_are_data_a_row_outside_the_baseline_is_as_if_it_were_not_there(name, seed):
    batch = make_batch(seed, name)
    found = compute(name, batch)
    assert not found[0, ~batch.counted].any()
    if batch.counted.any():
        assert_same(found[:, batch.counted], compute(name, batch.rows(batch.counted)))


@every
@few
@given(seed=seeds)
def test_layout_is_invisible_row_order_changes_nothing(name, seed):
    batch = make_batch(seed, name)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(batch.mask)))
    assert_same(compute(name, batch.rows(order)), compute(name, batch)[:, order])


@every
@few
@given(seed=seeds, on_the_left=st.booleans())
def test_layout_is_invisible_padding_changes_nothing(name, seed, on_the_left):
    batch = make_batch(seed, name)
    sides = (3, 0) if on_the_left else (0, 3)
    padded = {
        key: torch.nn.functional.pad(value, sides, value=FILLS[key]) if key in FILLS else value
        for key, value in batch.tensors.items()
    }
    found = compute(name, batch._replace(tensors=padded))
    assert_same(found[..., 3:] if on_the_left else found[..., :-3], compute(name, batch))


@every_by_group
@few
@given(seed=seeds, reward=st.sampled_from([7.7, 0.1, 1 / 3, 0.0]), copies=st.integers(1, 17))
def test_equal_rewards_give_exactly_zero_advantage(name, seed, reward, copies):
    """The same row over and over, or once, beside groups that differ.

    Estimators that compare turns with each other compare what is still to come: undiscounted, as
    there is one reward, at the end, that is equal too. What is 0 with a discount, and what is not,
    stands in their own tests.
    """
    batch = make_batch(seed, name)
    batch.tensors["in_baseline"][0] = True
    batch.tensors["response_mask"][0, 0] = 1
    last = int(batch.mask[0].nonzero().max())
    batch.tensors["token_level_rewards"][0] = 0
    batch.tensors["token_level_rewards"][0, last] = reward
    batch.objects["uid"][0] = "the same"
    repeated = batch.rows(torch.tensor([0] * copies + list(range(1, len(batch.mask)))))
    assert not compute(name, repeated, gamma=1.0)[0, :copies].any()


OUTCOME = [
    name
    for name in BY_GROUP
    if not {"turn_ids", "old_log_probs"}
    & inspect.signature(get_adv_estimator_fn(name)).parameters.keys()
]


@pytest.mark.parametrize("name", OUTCOME)
@few
@given(seed=seeds, reward=st.sampled_from([7.7, 0.1, 1 / 3]))
def test_equal_rewards_equal_scores_of_rows_that_differ_give_exactly_zero(name, seed, reward):
    """Of an outcome alone is compared what a row scored, not where its rewards stand."""
    batch = make_batch(seed, name)
    batch.tensors["response_mask"][:, 0] = 1
    draw = np.random.default_rng(seed)
    for row, mask in enumerate(batch.mask):
        batch.tensors["token_level_rewards"][row] = 0
        batch.tensors["token_level_rewards"][row, draw.choice(mask.nonzero().flatten())] = reward
        batch.objects["reward_extra_info"][row] = dict.fromkeys(KEYS, reward)
    assert not compute(name, batch).any()


@pytest.mark.parametrize("name", WHITENED)
@few
@given(seed=seeds)
def test_equal_rewards_a_batch_of_equal_returns_whitens_to_exactly_zero(name, seed):
    batch = make_batch(seed, name)
    batch.tensors["token_level_rewards"].zero_()
    batch.tensors["values"].zero_()
    assert not compute(name, batch)[0].any()


@every
def test_an_estimator_sees_what_it_is_given(name):
    """The invariants above hold of zeros too: each estimator does train on something."""
    assert any(compute(name, make_batch(seed, name))[0].any() for seed in range(10))


@every
def test_advantages_have_the_precision_of_the_rewards_and_no_gradient(name):
    batch = make_batch(3, name)
    found = compute(name, batch)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert not found.requires_grad
