"""`data.sampler`: a sampler with verl's interface orders the rows, and a resume is exact."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.schema.run import DataConfig
from agentrl.data.dataset import PromptDataset
from agentrl.data.rows import Prompt
from agentrl.errors import DataError, PluginError
from agentrl.protocol import DataProto
from agentrl.trainer.sampled_order import SampledOrder
from agentrl.workers.distributed import World, start_world
from tests.fakes.torchrun import ranks_of

SAMPLERS = """
import random
from collections import defaultdict
from collections.abc import Sized

import numpy as np
import torch
from torch.utils.data import RandomSampler

from agentrl.compat.verl.experimental.dataset.sampler import AbstractCurriculumSampler


class Backwards:
    def __init__(self, data_source, data_config):
        self.size = len(data_source)
        assert data_source[0]["reward_model"]["ground_truth"] == "0"
        assert data_config.seed == 3
    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))


class Global(Backwards):
    '''Draws from the global streams.'''
    def __iter__(self):
        rows = torch.randperm(self.size).tolist()
        random.shuffle(rows)
        return iter(np.random.permutation(rows).tolist())


class Counting(Backwards):
    '''Another order in each epoch, by a count of its own, with repeated rows.'''
    epoch = 0
    def __iter__(self):
        self.epoch += 1
        return iter([(row * self.epoch) % 3 for row in range(self.size)])


class Curriculum(AbstractCurriculumSampler):
    '''Verl's example: the update changes nothing.'''
    def __init__(self, data_source: Sized, data_config):
        self.sampler = RandomSampler(data_source=data_source)
    def __iter__(self):
        return self.sampler.__iter__()
    def __len__(self):
        return len(self.sampler)
    def update(self, batch) -> None:
        return


class Hardest(Backwards):
    '''Ends in the rows with the best scores; keeps generators of all kinds.'''
    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.scores = defaultdict(float)
        self.seen, self.weights = set(), np.ones(self.size)
        self.random, self.numpy = random.Random(1), np.random.default_rng(2)
        self.torch = torch.Generator().manual_seed(4)
    def __iter__(self):
        order = torch.randperm(self.size, generator=self.torch).tolist()
        self.random.shuffle(order)
        order = self.numpy.permutation(order).tolist()
        return iter(sorted(order, key=lambda row: self.scores[row] * self.weights[row]))
    def update(self, batch):
        for row in batch.batch["rows"].tolist():
            self.scores[row] += self.random.random()
            self.weights[row] *= 0.5
            self.seen.add(row)


class Stateful(Hardest):
    def state_dict(self):
        return {"scores": self.scores, "torch": self.torch.get_state(), "weights": self.weights}
    def load_state_dict(self, state):
        assert isinstance(state["weights"], np.ndarray)
        self.weights = state["weights"]
        self.scores.clear()
        self.scores.update(state["scores"])
        self.torch.set_state(state["torch"])
    def __iter__(self):
        return iter(torch.randperm(self.size, generator=self.torch).tolist())


class Short(Backwards):
    def __iter__(self):
        return iter([0, 1])


class Outside(Backwards):
    def __iter__(self):
        return iter([0, 1, 2, 99])


class NoArguments:
    def __iter__(self):
        return iter([])


class NoRows(Backwards):
    __iter__ = None
"""
pytestmark = pytest.mark.usefixtures("alone")
ALL = ["Backwards", "Global", "Counting", "Curriculum", "Hardest", "Stateful"]
ROWS = PromptDataset(
    Prompt(index=i, messages=[{"role": "user", "content": f"{i}?"}], ground_truth=str(i))
    for i in range(10)
)


def make(tmp_path: Path, name: str, world: World | None = None) -> SampledOrder:
    file = tmp_path / "samplers.py"
    if not file.exists():
        file.write_text(SAMPLERS)
    sampler: Any = {"path": str(file), "name": name}
    config = DataConfig.model_validate({"train_files": ["a"], "sampler": sampler, "seed": 3})
    return SampledOrder(ROWS, config, world or start_world("cpu", timeout_s=60))


def step(order: SampledOrder) -> list[int]:
    rows = order.next_batch(3)
    order.update(DataProto.from_dict({"rows": torch.tensor(rows)}))
    return rows


@pytest.mark.parametrize("num_before", range(8))
@pytest.mark.parametrize("name", ALL)
def test_resume_is_exact_at_each_step(tmp_path: Path, name: str, num_before: int):
    torch.manual_seed(num_before)  # the order does not depend on the global streams
    whole, first = make(tmp_path, name), make(tmp_path, name)
    expected = [step(whole) for _ in range(9)]
    found = [step(first) for _ in range(num_before)]
    resumed = make(tmp_path, name)
    resumed.load_state_dict(first.state_dict())
    found += [step(resumed) for _ in range(9 - num_before)]
    assert found == expected
    assert (resumed.epoch, resumed.position) == (whole.epoch, whole.position) == (2, 9)


@pytest.mark.parametrize("name", [name for name in ALL if name != "Counting"])
def test_an_epoch_has_each_row_at_most_once(tmp_path: Path, name: str):
    order = make(tmp_path, name)
    for _ in range(3):
        epoch = [row for _ in range(3) for row in step(order)]
        assert len(set(epoch)) == 9
    assert order.num_batches(3) == 3


def test_the_order_is_the_samplers(tmp_path: Path):
    order = make(tmp_path, "Backwards")
    assert [step(order) for _ in range(4)] == [[9, 8, 7], [6, 5, 4], [3, 2, 1], [9, 8, 7]]


def test_an_update_counts_in_the_same_epoch(tmp_path: Path):
    order = make(tmp_path, "Hardest")
    first = order.next_batch(3)
    left = [row for row in range(10) if row not in first]
    order.update(DataProto.from_dict({"rows": torch.tensor(left[:-3])}))
    assert sorted(order.next_batch(3)) == left[-3:]


def test_the_global_streams_are_left_as_they_were(tmp_path: Path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    step(make(tmp_path, "Global"))
    assert torch.rand(1) == expected


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("Short", DataError, "has 2 rows"),
        ("Outside", DataError, "gives 99"),
        ("NoArguments", PluginError, "data_source"),
        ("NoRows", PluginError, "__iter__"),
        ("Unknown", PluginError, "has no 'Unknown'"),
    ],
)
def test_a_sampler_that_cannot_order_the_rows_is_refused(
    tmp_path: Path, name: str, error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        step(make(tmp_path, name))


def test_another_dataset_is_refused(tmp_path: Path):
    state = make(tmp_path, "Hardest").state_dict() | {"fingerprint": "other"}
    with pytest.raises(DataError, match="fingerprint"):
        make(tmp_path, "Hardest").load_state_dict(state)


@pytest.mark.slow
def test_layout_is_invisible_two_ranks_take_the_batches_of_one(tmp_path: Path):
    alone = make(tmp_path, "Hardest")
    expected = [[step(alone) for _ in range(6)], alone.epoch, alone.position]
    with ranks_of("tests.fakes.sampled_ranks", str(tmp_path), "Hardest") as ranks:
        ended = [rank.wait() for rank in ranks]
    assert [rank.code for rank in ended] == [0, 0], [rank.err for rank in ended]
    assert [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)] == [expected] * 2
