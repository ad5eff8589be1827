"""The number of rows of a trajectory is invisible to every advantage estimator."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl.algorithms import adv_estimator_names, compute_advantage, get_adv_estimator_fn
from agentrl.algorithms.advantages.registry import estimator_facts
from agentrl.algorithms.trajectories import join_trajectories
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.protocol import DataProto
from tests.algorithms.advantages.test_invariants import FILLS, KEYS, Batch, make_batch

BUNDLED = [
    name
    for name in adv_estimator_names()
    if get_adv_estimator_fn(name).__module__.startswith("agentrl.")
]
BY_POSITION = {name for name in BUNDLED if estimator_facts(name).by_position}
OF_TOKENS = {name: fill for name, fill in FILLS.items() if name != "rejected"}


def split(batch: Batch, seed: int) -> tuple[Batch, torch.Tensor]:
    """Split trajectories between turns into one to three rows, moved to the left.

    Returns:
        The rows, with `trajectory_ids`, and for each row and token its index in the old batch.
    """
    draw = np.random.default_rng(seed)
    num_rows, width = batch.mask.shape
    turns = batch.tensors["turn_ids"]
    rows, origins = [], []
    for row in range(num_rows):
        changes = [at for at in range(1, width) if turns[row, at] != turns[row, at - 1]]
        count = int(draw.integers(0, min(2, len(changes)) + 1))
        cuts = sorted(draw.choice(changes, count, replace=False).tolist()) if count else []
        for start, end in zip([0, *cuts], [*cuts, width], strict=True):
            rows.append(row)
            origins.append([row * width + at for at in range(start, end)])
    order = torch.tensor(rows)
    origin = torch.full((len(rows), width), -1)
    for index, part in enumerate(origins):
        origin[index, : len(part)] = torch.tensor(part)
    tensors = {}
    for name, column in batch.tensors.items():
        if name in OF_TOKENS:
            moved = column.reshape(-1)[origin.clamp(min=0)]
            tensors[name] = torch.where(origin >= 0, moved, OF_TOKENS[name])
        else:
            tensors[name] = column[order]
    tensors["turn_ids"] = torch.where(origin >= 0, tensors["turn_ids"], -1)
    tensors["trajectory_ids"] = order + 1000
    return Batch(tensors, {key: v[order.numpy()] for key, v in batch.objects.items()}), origin


def compute(name: str, batch: Batch) -> torch.Tensor:
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.5, gdpo_reward_keys=KEYS)
    tensors = {key: value.clone() for key, value in batch.tensors.items()}
    data = DataProto.from_dict(tensors, {key: list(v) for key, v in batch.objects.items()})
    done = compute_advantage(data, config).batch
    return torch.stack([done["advantages"], done["returns"]])


@pytest.mark.parametrize("name", [name for name in BUNDLED if name not in BY_POSITION])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_number_of_rows_of_a_trajectory_is_invisible(name: str, seed: int) -> None:
    batch = make_batch(seed, name)
    if name == "grpo_passk_verl":  # it refuses a group of one
        batch = batch.rows(torch.arange(len(batch.mask)).repeat(2))
    assume(batch.mask.sum() > 1)  # verl's estimators have no variance otherwise
    parts, origin = split(batch, seed)
    found, expected = compute(name, parts), compute(name, batch)
    at_origin = expected.reshape(2, -1)[:, origin.clamp(min=0)]
    at_origin = torch.where(parts.mask, at_origin, 0.0)
    torch.testing.assert_close(found * parts.mask, at_origin, rtol=1e-4, atol=1e-5)


def test_estimator_that_compares_positions_refuses_trajectories_of_several_rows() -> None:
    assert {"optimal_token_baseline_verl"} == BY_POSITION
    batch = make_batch(0, "grpo")
    batch.tensors["trajectory_ids"] = torch.zeros(len(batch.mask), dtype=torch.int64)
    with pytest.raises(ConfigError, match="compares tokens by their positions"):
        compute("optimal_token_baseline_verl", batch)


def test_rows_are_joined_in_their_order_and_split_again() -> None:
    data = DataProto.from_dict(
        {
            "trajectory_ids": torch.tensor([7, 8, 7]),
            "response_mask": torch.tensor([[0, 1, 0], [1, 0, 0], [1, 1, 0]]),
            "values": torch.tensor([[1.0, 2, 9], [3, 9, 9], [4, 5, 9]]),
            "turn_ids": torch.tensor([[0, 1, -1], [0, -1, -1], [0, 0, -1]]),
            "in_baseline": torch.tensor([True, False, True]),
        },
        {"uid": ["a", "b", "a"], "request_id": ["x#0", "y", "x"]},
    )
    joined = join_trajectories(data)
    assert joined is not None
    columns = {name: column.tolist() for name, column in joined.data.batch.items()}
    assert columns == {
        "response_mask": [[0, 1, 1, 1], [1, 0, 0, 0]],
        "values": [[1, 2, 4, 5], [3, 0, 0, 0]],
        "turn_ids": [[0, 1, 2, 2], [0, -1, -1, -1]],
        "in_baseline": [True, False],
    }
    assert joined.data.non_tensor_batch["request_id"].tolist() == ["x", "y"]
    split_again = joined.split(joined.data.batch["values"])
    assert split_again.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 0]]


def test_batch_with_one_row_for_each_trajectory_is_left_as_it_is() -> None:
    batch = make_batch(3, "grpo")
    batch.tensors["trajectory_ids"] = torch.arange(len(batch.mask))
    assert join_trajectories(DataProto.from_dict(batch.tensors)) is None
