"""The manager `batch`: one call scores many requests."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Self, cast

from agentrl.config.schema.run import RewardConfig
from agentrl.errors import RewardError
from agentrl.plugins.call import ExecutionMode, contained
from agentrl.rewards.calling import ScoreCaller
from agentrl.rewards.manager import register_reward_manager
from agentrl.rewards.managers import cancel_and_wait, fail_scoring, settle_score
from agentrl.rewards.scoring import ScoreFn, make_told, read_score
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState

PLURALS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
"""What a scorer of batches is told, by what a scorer of one answer is told."""


@register_reward_manager("batch")
class BatchRewardManager:
    """Calls `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)`.

    It gets lists of one length, and returns one of as many numbers or dicts. While others still
    roll out (`reward.launch_reward_fn_async`) a call gets a group, when the last of its samples has
    ended; without, one call gets all that completed. (On several ranks: of this rank's samples.)

    Args:
        compute_score: The scorer of batches, its `reward_kwargs` bound.
        config: Time-out of one call, calls in a second.
    """

    def __init__(self, compute_score: ScoreFn, config: RewardConfig) -> None:
        self._compute_score = compute_score
        self._caller = ScoreCaller(compute_score, config, ExecutionMode.THREAD)
        self._room = config.max_concurrent_scores

    def scoring(self, requests: Sequence[AsyncRolloutRequest]) -> "BatchScoring":
        """Open the scoring of one batch; see `LaunchingManager.scoring`."""
        return BatchScoring(self, requests, room=self._room)

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Score the completed requests, in one call; see `RewardManager.score`."""
        completed = [request for request in requests if request.state is RequestState.COMPLETED]
        if completed:
            await self.score_together(completed)

    async def close(self) -> None:
        """Give back what the scorer holds."""
        await self._caller.close()

    async def score_together(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Score these in one call; a bad item fails its own request, a bad call all of them."""
        begun = time.monotonic()
        try:
            returned = await self._call(requests)
        except Exception as error:  # noqa: BLE001 - the boundary round scorers (a failed request is data)
            for request in requests:
                fail_scoring(request, error, self._compute_score)
        else:
            for request, item in zip(requests, returned, strict=True):
                self._settle(request, item)
        seconds = time.monotonic() - begun
        for request in requests:
            request.metrics["seconds_reward"] = seconds

    def _settle(self, request: AsyncRolloutRequest, item: object) -> None:
        try:
            score = contained(partial(read_score, item))
        except Exception as error:  # noqa: BLE001 - the boundary round scorers (a failed request is data)
            fail_scoring(request, error, self._compute_score)
        else:
            settle_score(request, score)

    async def _call(self, requests: Sequence[AsyncRolloutRequest]) -> list[Any]:
        told = [make_told(request) for request in requests]
        lists = {name: [one[single] for one in told] for single, name in PLURALS.items()}
        returned = await self._caller.call(self._compute_score, lists)
        return contained(partial(_read_items, returned, len(told)))


def _read_items(returned: Any, num_requests: int) -> list[Any]:
    if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__len__"):
        raise RewardError(
            f"the scorer returned {returned!r:.200}", expected=f"a list of {num_requests} scores"
        )
    items = list(cast("Sequence[Any]", returned))
    if len(items) != num_requests:
        raise RewardError(
            f"the scorer returned {len(items)} scores", expected=f"{num_requests}, one for each"
        )
    return items


class BatchScoring:
    """Scores each group when the last of its samples has ended. An async context manager.

    So what stands in one call depends on no clock, and a scorer may compare a group's answers.

    Args:
        manager: Makes the calls.
        requests: Of all groups, before they roll out.
        room: Calls at work at once.
    """

    def __init__(
        self, manager: BatchRewardManager, requests: Sequence[AsyncRolloutRequest], *, room: int
    ) -> None:
        self._manager = manager
        self._missing = Counter(request.uid for request in requests)
        self._ended: defaultdict[str, list[AsyncRolloutRequest]] = defaultdict(list)
        self._room = asyncio.Semaphore(room)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._tasks)

    def begin(self, request: AsyncRolloutRequest) -> None:
        """Note the end of a request; behind the last of its group the group is scored."""
        group = self._ended[request.uid]
        group.append(request)
        if len(group) == self._missing[request.uid]:
            group.sort(key=lambda one: one.rollout_offset)
            self._tasks.append(asyncio.create_task(self._score(group)))

    async def done(self) -> None:
        """Wait for all of them."""
        await asyncio.gather(*self._tasks)

    async def _score(self, group: Sequence[AsyncRolloutRequest]) -> None:
        async with self._room:
            await self._manager.score(group)
