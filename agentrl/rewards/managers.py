"""The managers `naive`, `dapo` and `prime`: each request is scored by itself, many at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from agentrl.config.schema.run import RewardConfig
from agentrl.errors import Fault, RewardError
from agentrl.plugins.call import ExecutionMode
from agentrl.rewards.calling import ScoreCaller
from agentrl.rewards.functions import WeightedScorers
from agentrl.rewards.loading import name_of
from agentrl.rewards.manager import register_reward_manager
from agentrl.rewards.scoring import Score, ScoreFn, check_number
from agentrl.rollout.failures import describe_failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState

ScoreOne = Callable[[AsyncRolloutRequest], Awaitable[None]]


class SingleScoring:
    """Scores each request in a task of its own. An async context manager.

    Args:
        score_one: Scores a request in place; raises nothing.
        room: Scores at work at once.
    """

    def __init__(self, score_one: ScoreOne, *, room: int) -> None:
        self._score_one = score_one
        self._room = asyncio.Semaphore(room)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._tasks)

    def begin(self, request: AsyncRolloutRequest) -> None:
        """Begin to score a request, where it completed."""
        if request.state is RequestState.COMPLETED:
            self._tasks.append(asyncio.create_task(self._score(request)))

    async def done(self) -> None:
        """Wait for all of them."""
        await asyncio.gather(*self._tasks)

    async def _score(self, request: AsyncRolloutRequest) -> None:
        async with self._room:
            await self._score_one(request)


async def cancel_and_wait(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what is not done, and let it clean up."""
    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting)


@register_reward_manager("naive")
class NaiveRewardManager:
    """Scores each request by itself; plain functions run on threads.

    Args:
        compute_score: The scorer, its `reward_kwargs` bound; or several, weighted.
        config: Time-out, concurrency, rate limit.
    """

    mode = ExecutionMode.THREAD

    def __init__(self, compute_score: ScoreFn, config: RewardConfig) -> None:
        self._compute_score = compute_score
        self._caller = ScoreCaller(compute_score, config, self.mode)
        self._room = config.max_concurrent_scores

    def scoring(self, requests: Sequence[AsyncRolloutRequest]) -> SingleScoring:
        """Open the scoring of one batch; see `LaunchingManager.scoring`."""
        return SingleScoring(self._score_one, room=self._room)

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Score the completed requests; see `RewardManager.score`."""
        async with self.scoring(requests) as scores:
            for request in requests:
                scores.begin(request)
            await scores.done()

    async def close(self) -> None:
        """Give back what the scorers share."""
        await self._caller.close()

    async def _score_one(self, request: AsyncRolloutRequest) -> None:
        try:
            score = await self._caller.score(request)
        except Exception as error:  # noqa: BLE001 - the boundary round scorers (a failed request is data)
            fail_scoring(request, error, self._compute_score)
        else:
            settle_score(request, score)


# What it adds to `naive` elsewhere is a setting of every manager here: `reward.overlong_buffer`.
register_reward_manager("dapo")(NaiveRewardManager)


@register_reward_manager("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Scores each request by itself; plain functions run in processes, which can be killed.

    For scorers that compute: threads of one process compute one after another, and none of them
    can be stopped. `num_workers` processes serve the run; one that is late or dies is replaced.

    Args:
        compute_score: The scorer: at the top of a module or file, no lambda and no closure.
        config: Time-out, processes, rate limit.
    """

    mode = ExecutionMode.PROCESS


def settle_score(request: AsyncRolloutRequest, score: Score) -> None:
    """Give a request its reward; it fails where another reward of it is no finite number."""
    try:
        check_rollout_rewards(request)
    except RewardError as error:
        request.fail_scoring(describe_failure(error, Fault.REWARD, turn=len(request.turns)))
    else:
        request.reward, request.reward_extra_info = score.value, score.extra


def fail_scoring(request: AsyncRolloutRequest, error: Exception, scorer: ScoreFn) -> None:
    """Let a request fail by its reward, and name the function that is to blame.

    Of several, the error itself names the one.
    """
    failure = describe_failure(error, Fault.REWARD, turn=len(request.turns))
    if not isinstance(scorer, WeightedScorers):
        told = f"the reward function {name_of(scorer, request.data_source)!r}: {failure.message}"
        failure = failure.model_copy(update={"message": told})
    request.fail_scoring(failure)


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
