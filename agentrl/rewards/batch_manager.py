"""The manager `batch`: one call scores many requests."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Self, cast

from agentrl.config.schema import RewardConfig
from agentrl.errors import RewardError
from agentrl.rewards.calling import ScoreCaller
from agentrl.rewards.manager import register_reward_manager
from agentrl.rewards.scoring import ScoreFn, make_told, read_score
from agentrl.rewards.single_managers import cancel_and_wait, fail_scoring, set_score
from agentrl.rewards.sources import Lane
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

    It gets lists of one length, and returns one of as many numbers or dicts. One call is under way
    at a time. While others still roll out (`reward.launch_reward_fn_async`) a call gets what has
    ended since the last one began; without, one call gets all that completed.

    Args:
        compute_score: The scorer of batches, its `reward_kwargs` bound.
        config: Time-out of one call, calls in a second.
    """

    def __init__(self, compute_score: ScoreFn, config: RewardConfig) -> None:
        self._compute_score = compute_score
        self._caller = ScoreCaller(compute_score, config, Lane.THREAD)

    def scoring(self) -> "BatchScoring":
        """Open the scoring of one batch; see `LaunchingManager.scoring`."""
        return BatchScoring(self)

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
        except Exception as error:  # noqa: BLE001 - the boundary round scorers (law 5)
            for request in requests:
                fail_scoring(request, error)
        else:
            for request, item in zip(requests, returned, strict=True):
                _settle(request, item)
        seconds = time.monotonic() - begun
        for request in requests:
            request.metrics["seconds_reward"] = seconds

    async def _call(self, requests: Sequence[AsyncRolloutRequest]) -> list[Any]:
        told = [make_told(request) for request in requests]
        lists = {name: [one[single] for one in told] for single, name in PLURALS.items()}
        returned = await self._caller.call(self._compute_score, lists)
        if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__len__"):
            raise RewardError(
                f"the scorer returned {returned!r:.200}", expected=f"a list of {len(told)} scores"
            )
        items = list(cast("Sequence[Any]", returned))
        if len(items) != len(told):
            raise RewardError(
                f"the scorer returned {len(items)} scores", expected=f"{len(told)}, one for each"
            )
        return items


def _settle(request: AsyncRolloutRequest, item: object) -> None:
    try:
        set_score(request, read_score(item))
    except Exception as error:  # noqa: BLE001 - the boundary round scorers (law 5)
        fail_scoring(request, error)


class BatchScoring:
    """Scores what has ended, and meanwhile gathers the next batch. An async context manager.

    Args:
        manager: Makes the calls.
    """

    def __init__(self, manager: BatchRewardManager) -> None:
        self._manager = manager
        self._waiting: list[AsyncRolloutRequest] = []
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._worker is not None:
            await cancel_and_wait([self._worker])

    def begin(self, request: AsyncRolloutRequest) -> None:
        """Put a request into the next batch, where it completed."""
        if request.state is not RequestState.COMPLETED:
            return
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())

    async def done(self) -> None:
        """Wait for the last batch."""
        if self._worker is not None:
            await self._worker

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await self._manager.score_together(batch)
