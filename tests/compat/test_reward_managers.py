"""Reward managers that users wrote for verl score the requests of a run."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from agentrl.compat import install_verl
from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import ConfigError
from agentrl.plugins import load_module
from agentrl.rewards import managers as own_managers
from agentrl.rewards.managers import make_reward_manager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState
from tests.fakes.finished_requests import decode_bytes, make_tool_request

COPY = '''
import torch
from collections import defaultdict

from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn


@register("{name}")
class CopiedManager(AbstractRewardManager):
    """Scores a row by the length of its decoded response; one line of a copy was changed."""

    def __init__(self, tokenizer, num_examine, compute_score: RawRewardFn = None,
                 reward_fn_key="data_source", weights=None, factor=1.0):
        self.tokenizer, self.reward_fn_key, self.factor = tokenizer, reward_fn_key, factor
        self.weights = weights
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict: bool = False):
        assert "rm_scores" not in data.batch.keys()
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            length = item.batch["prompts"].shape[-1]
            valid = int(item.batch["attention_mask"][length:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:valid], skip_special_tokens=True)
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            assert item.non_tensor_batch[self.reward_fn_key] == "sums"
            score = float(text.endswith(truth + ".")) * self.factor
            if self.weights is not None:
                score += self.weights.bonus
            item.non_tensor_batch["extra_info"]["num_turns"] = 9
            extra["right"].append(score > 0)
            reward_tensor[i, valid - 1] = score
        return {returned}
'''
BOTH = (
    "dict(reward_tensor=reward_tensor, reward_extra_info=extra) if return_dict else reward_tensor"
)


class BytesTokenizer:
    pad_token_id = 0

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return decode_bytes(ids.tolist())


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import verl's stand-in; forget after the test what it registered."""
    monkeypatch.setenv("AGENTRL_VERL", "1")
    install_verl()
    from agentrl.compat import reward_managers

    monkeypatch.setattr(reward_managers, "REWARD_MANAGER_REGISTRY", {})
    monkeypatch.setattr(own_managers._MANAGERS, "_found", dict(own_managers._MANAGERS._found))


def score(
    tmp_path: Path, name: str, returned: str = BOTH, **kwargs: Any
) -> list[AsyncRolloutRequest]:
    file = tmp_path / "copied.py"
    file.write_text(COPY.format(name=name, returned=returned))
    load_module(str(file))
    config = RewardConfig(manager=name, manager_kwargs=kwargs)
    manager = make_reward_manager(config, load_tokenizer=BytesTokenizer)
    requests = [make_tool_request(data_source="sums", ground_truth=t) for t in ("5", "6")]
    asyncio.run(manager.score(requests))
    return requests


@pytest.mark.parametrize("name", ["naive", "dapo", "prime", "batch", "mine"])
def test_a_copied_manager_scores_under_any_name(tmp_path: Path, name: str, caplog: Any):
    with caplog.at_level(logging.WARNING):
        requests = score(tmp_path, name)
    assert [request.reward for request in requests] == [1.0, 0.0]
    assert [request.reward_extra_info["right"] for request in requests] == [True, False]
    assert [request.extra_info for request in requests] == [{}, {}]
    assert ("replaces the bundled reward manager" in caplog.text) is (name != "mine")


@pytest.mark.parametrize(
    ("kwargs", "rewards"),
    [
        ({"factor": 3}, [3.0, 0.0]),
        ({"weights": {"bonus": 0.5}}, [1.5, 0.5]),
        ({"factor": 0.5, "weights": {"bonus": 1}}, [1.5, 1.0]),
    ],
)
def test_a_manager_gets_its_arguments(tmp_path: Path, kwargs: dict[str, Any], rewards: list[float]):
    assert [request.reward for request in score(tmp_path, "mine", **kwargs)] == rewards


def test_a_tensor_alone_is_read_too(tmp_path: Path):
    requests = score(tmp_path, "mine", "reward_tensor")
    assert [request.reward for request in requests] == [1.0, 0.0]


@pytest.mark.parametrize("returned", ["None", "reward_tensor[:1]", "{}", "[1.0, 2.0]"])
def test_what_is_no_tensor_of_rewards_fails_the_requests(tmp_path: Path, returned: str):
    requests = score(tmp_path, "mine", returned.replace("{}", "dict()"))
    assert {request.state for request in requests} == {RequestState.FAILED}
    assert all("reward_tensor" in str(request.error) for request in requests)


@pytest.mark.parametrize("name", ["naive", "prime", "batch", "dapo"])
def test_bundled_managers_take_no_arguments(name: str):
    config = RewardConfig(manager=name, manager_kwargs={"factor": 2})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'factor'") as caught:
        make_reward_manager(config)
    assert caught.value.key == "reward.manager_kwargs"


def test_an_argument_that_a_manager_does_not_take_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="'factors'") as caught:
        score(tmp_path, "mine", factors=2)
    assert "factor" in str(caught.value.expected)


def test_a_second_class_of_a_user_is_refused(tmp_path: Path):
    score(tmp_path, "mine")
    other = tmp_path / "other.py"
    other.write_text(
        COPY.format(name="mine", returned=BOTH).replace("CopiedManager", "OtherManager")
    )
    with pytest.raises(Exception, match="already"):
        load_module(str(other))


def test_a_manager_of_ones_own_for_agentrl_gets_its_arguments():
    class Constant:
        def __init__(self, compute_score: Any, config: RewardConfig, value: float = 0.0) -> None:
            self.value = value

        async def score(self, requests: Any) -> None:
            for request in requests:
                request.reward = self.value

    own_managers.register_reward_manager("constant-with-a-value")(Constant)
    config = RewardConfig(manager="constant-with-a-value", manager_kwargs={"value": 4.0})
    request = make_tool_request()
    asyncio.run(make_reward_manager(config).score([request]))
    assert request.reward == 4.0
