"""Reward managers, by name: they score the finished requests of a batch."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from agentrl.config.schema import RewardConfig
from agentrl.errors import Fault
from agentrl.plugins.registry import Registry
from agentrl.rewards.scoring import (
    ScoreFn,
    check_number,
    compute_request_score,
    load_compute_score,
)
from agentrl.rollout.failures import describe_failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState

MAX_CONCURRENT_SCORES = 64
"""Scores at work at once: enough to wait for judges, few enough not to drown the machine."""


class RewardManager(Protocol):
    """What scores requests. Made as `factory(compute_score, config)`, once for each run."""

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Set `reward` and `reward_extra_info` of each completed request, in place.

        Never raises for a scorer's sake: where one fails, its request alone becomes FAILED, with
        `Fault.REWARD`. Requests that had failed before are left as they are.
        """
        ...

    async def close(self) -> None:
        """Give back what the run shares: processes, connections. Called once, when a run ends."""
        ...


RewardManagerFactory = Callable[[ScoreFn, RewardConfig], RewardManager]
F = TypeVar("F", bound=RewardManagerFactory)

_MANAGERS: Registry[RewardManagerFactory] = Registry("reward manager", key="reward.manager")


def register_reward_manager(name: str) -> Callable[[F], F]:
    """Decorate a class (or factory) of managers, so that `reward.manager` finds it.

    Raises:
        ConfigError: where the name is taken.
    """
    return _MANAGERS.register(name)


def get_reward_manager(name: str) -> RewardManagerFactory:
    """Find a manager's class by name.

    Raises:
        ConfigError: for an unknown name.
    """
    return _MANAGERS.get(name)


def make_reward_manager(config: RewardConfig) -> RewardManager:
    """Make the configured manager with the configured scorer.

    Raises:
        ConfigError: for an unknown manager.
        PluginError: where the scorer cannot be loaded.
    """
    factory = get_reward_manager(config.manager)
    return factory(load_compute_score(config.custom_reward_function), config)


@register_reward_manager("naive")
class NaiveRewardManager:
    """Scores each request by itself, many at once.

    Args:
        compute_score: The scorer, its `reward_kwargs` bound.
        config: The time-out of one score.
    """

    def __init__(self, compute_score: ScoreFn, config: RewardConfig) -> None:
        self._compute_score = compute_score
        self._timeout_s = config.timeout_s

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Score the completed requests; see `RewardManager.score`."""
        room = asyncio.Semaphore(MAX_CONCURRENT_SCORES)
        async with asyncio.TaskGroup() as group:
            for request in requests:
                if request.state is RequestState.COMPLETED:
                    group.create_task(self._score_one(request, room))

    async def close(self) -> None:
        """Hold nothing, so give nothing back."""

    async def _score_one(self, request: AsyncRolloutRequest, room: asyncio.Semaphore) -> None:
        async with room:
            try:
                score = await compute_request_score(
                    request, self._compute_score, timeout_s=self._timeout_s
                )
                check_rollout_rewards(request)
            except Exception as error:  # noqa: BLE001 - the boundary round scorers (law 5)
                turn = len(request.turns)
                request.fail_scoring(describe_failure(error, Fault.REWARD, turn=turn))
            else:
                request.reward, request.reward_extra_info = score.value, score.extra


# What it adds to `naive` elsewhere is a setting of every manager here: `reward.overlong_buffer`.
register_reward_manager("dapo")(NaiveRewardManager)


def check_rollout_rewards(request: AsyncRolloutRequest) -> None:
    """Hold the rewards of tools and turns to what a scorer's are held to.

    Raises:
        RewardError: naming the tool or turn whose reward is no finite number.
    """
    for name, reward in request.tool_rewards.items():
        check_number(reward, f"the reward of the tool {name!r}")
    for turn in request.turns:
        for reward in (turn.reward, *(call.reward for call in turn.calls)):
            if reward is not None:
                check_number(reward, f"a reward of turn {turn.index}")
