"""The managers `naive`, `dapo` and `prime`: each request is scored by itself, many at once."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, Self, TypeVar, cast, runtime_checkable

from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import Fault, RewardError
from agentrl.plugins.call import ExecutionMode, contained
from agentrl.plugins.registry import Registry
from agentrl.rewards.calling import ScoreCaller
from agentrl.rewards.loading import bundled_in, load_scorers, name_of
from agentrl.rewards.scoring import (
    Score,
    ScoreFn,
    WeightedScorers,
    check_number,
    make_told,
    read_score,
)
from agentrl.rollout.failures import describe_failure
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState
from agentrl.sandbox.factory import check_sandbox


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


class Scoring(Protocol):
    """The scoring of one batch, under way while requests of it still roll out."""

    def begin(self, request: AsyncRolloutRequest) -> None:
        """Begin to score a request that has ended; returns at once."""
        ...

    async def done(self) -> None:
        """Wait until all are scored that were begun."""
        ...


@runtime_checkable
class StreamingRewardManager(Protocol):
    """A manager that also scores requests one by one, as they end."""

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """See `RewardManager.score`."""
        ...

    async def close(self) -> None:
        """See `RewardManager.close`."""
        ...

    def scoring(
        self, requests: Sequence[AsyncRolloutRequest]
    ) -> AbstractAsyncContextManager[Scoring]:
        """Open the scoring of requests that are about to roll out; each is begun when it has ended.

        Under the failure policy `retry` what is begun may be a later attempt, of the same `uid`.
        Leaving the block early cancels what is under way.
        """
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


def check_code_scorers(config: RewardConfig, sources: Iterable[str] = ()) -> None:
    """Look for a sandbox where a bundled scorer needs one, before anything is scored.

    Args:
        config: The reward section.
        sources: The `data_source` of the rows, where they are known.

    Raises:
        SandboxError: with what to install.
        MissingExtraError: likewise.
    """
    if runs_code(config, sources):
        check_sandbox(config.sandbox, key="reward.sandbox")


def runs_code(config: RewardConfig, sources: Iterable[str] = ()) -> bool:
    """Whether a bundled scorer, for rows of these sources, runs code that a model wrote.

    Raises:
        RewardError: for a source that has no scorer and needs one.
    """
    return any(scorer.needs_sandbox for scorer in bundled_in(config, sources))


def make_reward_manager(config: RewardConfig, scorer: ScoreFn | None = None) -> RewardManager:
    """Make the configured manager with the configured scorer, or scorers.

    Args:
        config: The reward section.
        scorer: The scorer itself, in the place of what the section names.

    Raises:
        ConfigError: for an unknown manager, and `reward_kwargs` that a scorer does not take.
        PluginError: where a scorer cannot be loaded.
        SandboxError: where one runs code, and nothing on this machine keeps it in.
    """
    check_code_scorers(config)
    made = get_reward_manager(config.manager)(scorer or load_scorers(config), config)
    launches = config.launch_reward_fn_async and isinstance(made, StreamingRewardManager)
    return made if launches else ScoreAfterRollout(made)


class ScoreAfterRollout:
    """Hides that a manager can score early; it is asked when all have rolled out.

    Args:
        manager: One that can, or a user's own that has a `score` alone.
    """

    def __init__(self, manager: RewardManager) -> None:
        self._manager = manager

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """See `RewardManager.score`."""
        await self._manager.score(requests)

    async def close(self) -> None:
        """See `RewardManager.close`."""
        if hasattr(self._manager, "close"):
            await self._manager.close()


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
        """Open the scoring of one batch; see `StreamingRewardManager.scoring`."""
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


def _untimed(_: str) -> AbstractContextManager[None]:
    return nullcontext()


async def drive_and_score(
    manager: RolloutManager,
    rewards: RewardManager,
    requests: Sequence[AsyncRolloutRequest],
    *,
    on_finished: Callable[[AsyncRolloutRequest], None],
    timer: Callable[[str], AbstractContextManager[None]] = _untimed,
) -> list[AsyncRolloutRequest]:
    """Drive requests to their ends and score them; the result has their order.

    What a failure of either costs, `RolloutManager.drive` and `RewardManager.score` say. Cancelling
    ends the requests and cancels the scores under way.

    Args:
        manager: Rolls out.
        rewards: Scores; a `StreamingRewardManager` scores what has ended, while others roll out: a
            slow scorer then costs what it is slower than the rest of the rollout.
        requests: Pending requests.
        on_finished: Told of each request when it has ended, before it is scored.
        timer: Entered as `gen` for the rollout, and as `reward` for what is waited for behind it.

    Raises:
        Exception: see `RolloutManager.drive`.
    """
    if not isinstance(rewards, StreamingRewardManager):
        with timer("gen"):
            finished = await manager.drive(requests, on_finished=on_finished)
        with timer("reward"):
            await rewards.score(finished)
        return finished

    async with rewards.scoring(requests) as scores:

        def tell(request: AsyncRolloutRequest) -> None:
            on_finished(request)
            scores.begin(request)

        with timer("gen"):
            finished = await manager.drive(requests, on_finished=tell)
        with timer("reward"):
            await scores.done()
    return finished


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
        """Open the scoring of one batch; see `StreamingRewardManager.scoring`."""
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
