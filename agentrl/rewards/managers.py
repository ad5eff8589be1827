"""Reward managers: they score finished requests, during or after the rollout.

`naive`, `dapo` and `prime` score each request by itself, `batch` scores many in one call.
`drive_and_score` rolls out and scores.
"""

import asyncio
import inspect
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, Self, TypeVar, cast, runtime_checkable

from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import ConfigError, Fault, RewardError
from agentrl.plugins.call import ExecutionMode, contained
from agentrl.plugins.registry import Registry
from agentrl.plugins.remote import Remotes
from agentrl.rewards.calling import ScoreCaller
from agentrl.rewards.loading import (
    GIVEN,
    LoadedScorer,
    bundled_in,
    bundled_of,
    load_scorers,
    mentions_ground_truth,
    name_of,
    parts_of,
    placed_scorers,
)
from agentrl.rewards.scoring import (
    Score,
    ScoreFn,
    WeightedScorers,
    check_number,
    make_arguments,
    read_score,
)
from agentrl.rewards.sources import BUNDLED
from agentrl.rollout.failures import describe_failure
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.records import unix_time
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState
from agentrl.sandbox.factory import check_sandbox


class RewardManager(Protocol):
    """Scores requests. Made once per run, as `factory(compute_score, config, **manager_kwargs)`."""

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Set `reward` and `reward_extra_info` of each completed request, in place.

        It raises nothing if a scorer fails: that request alone becomes FAILED, with
        `Fault.REWARD`. Requests that failed before stay as they are.
        """
        ...

    async def close(self) -> None:
        """Release what the run shares: processes, connections. Called once, at the run's end."""
        ...


class Scoring(Protocol):
    """Scores one batch while requests of it still roll out."""

    def begin(self, request: AsyncRolloutRequest) -> None:
        """Start to score a request that has ended, and return at once."""
        ...

    async def done(self) -> None:
        """Wait until all requests that were started are scored."""
        ...


@runtime_checkable
class StreamingRewardManager(RewardManager, Protocol):
    """A manager that also scores requests one by one, as they end."""

    def scoring(
        self, requests: Sequence[AsyncRolloutRequest]
    ) -> AbstractAsyncContextManager[Scoring]:
        """Open the scoring of requests that are about to roll out. Each starts when it has ended.

        Under the failure policy `retry` a started request may be a later attempt, with the same
        `uid`. Leaving the block early cancels the scores that are not finished.
        """
        ...


RewardManagerFactory = Callable[[ScoreFn, RewardConfig], RewardManager]
F = TypeVar("F", bound=RewardManagerFactory)

_MANAGERS: Registry[RewardManagerFactory] = Registry("reward manager", key="reward.manager")


def register_reward_manager(name: str) -> Callable[[F], F]:
    """Decorate a class (or factory) of managers, so that `reward.manager` finds it.

    Raises:
        ConfigError: If the name is taken.
    """
    return _MANAGERS.register(name)


def get_reward_manager(name: str) -> RewardManagerFactory:
    """Return a manager's class by name.

    Raises:
        ConfigError: If the name is unknown.
    """
    return _MANAGERS.get(name)


def check_code_scorers(config: RewardConfig, sources: Iterable[str] = ()) -> None:
    """Check before anything is scored that a sandbox is available if a bundled scorer needs one.

    Args:
        config: The reward section.
        sources: The `data_source` of the rows, if they are known.

    Raises:
        SandboxError: If there is no sandbox; it says what to install.
        MissingExtraError: If the provider that is asked for is not installed.
    """
    if runs_code(config, sources):
        check_sandbox(config.sandbox, key="reward.sandbox")


def runs_code(config: RewardConfig, sources: Iterable[str] = ()) -> bool:
    """Whether a bundled scorer, for rows of these sources, runs code that a model wrote.

    Raises:
        RewardError: If a source needs a bundled scorer and has none.
    """
    return any(scorer.needs_sandbox for scorer in bundled_in(config, sources))


def make_reward_manager(
    config: RewardConfig,
    scorer: ScoreFn | None = None,
    *,
    remotes: Remotes | None = None,
    load_tokenizer: Callable[[], Any] | None = None,
) -> RewardManager:
    """Make the configured manager with the configured scorers.

    Args:
        config: The reward section.
        scorer: A scorer that replaces those of the section.
        remotes: The scorers that run in processes with their `resources`.
        load_tokenizer: Loads the policy's tokenizer, for a manager that has the argument
            `tokenizer`.

    Raises:
        ConfigError: If the manager is unknown or does not take `reward.manager_kwargs`, or a
            scorer does not take its `reward_kwargs`.
        PluginError: If a scorer cannot be loaded.
        SandboxError: If a scorer runs code and no sandbox is available.
    """
    check_code_scorers(config)
    scorers = scorer or load_scorers(config)
    for key, index, _ in placed_scorers(config) if remotes else ():
        part = parts_of(scorers)[index or 0]
        if isinstance(part, LoadedScorer):
            part.remote = (remotes or {}).get(key)
    factory, kwargs = get_reward_manager(config.manager), dict(config.manager_kwargs)
    if load_tokenizer is not None and "tokenizer" in inspect.signature(factory).parameters:
        kwargs["tokenizer"] = load_tokenizer()
    check_manager_kwargs(factory, (scorers, config), kwargs, config.manager)
    made = cast("Callable[..., RewardManager]", factory)(scorers, config, **kwargs)
    is_streaming = config.launch_reward_fn_async and isinstance(made, StreamingRewardManager)
    return made if is_streaming else ScoreAfterRollout(made, config)


def check_manager_kwargs(
    factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> None:
    """Check that a reward manager takes these arguments.

    Raises:
        ConfigError: If it does not; with the arguments that it takes.
    """
    signature = inspect.signature(factory)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        taken = ", ".join(list(signature.parameters)[len(args) :]) or "none"
        raise ConfigError(
            f"the reward manager {name!r}: {error}",
            key="reward.manager_kwargs",
            expected=f"arguments that it takes: {taken}",
        ) from None


def readers_of_truth(rewards: RewardManager) -> list[ScoreFn]:
    """List the scorers of a manager that read ground truths, as far as their code shows.

    The bundled judge also scores without one.
    """
    manager = rewards.manager if isinstance(rewards, ScoreAfterRollout) else rewards
    if not isinstance(manager, NaiveRewardManager):
        return []
    parts = parts_of(manager.compute_score)
    judge = BUNDLED["judge"]
    return [one for one in parts if bundled_of(one) is not judge and mentions_ground_truth(one)]


def scores_alone(rewards: RewardManager) -> bool:
    """Whether a manager scores each request without the others, so that any process may do it."""
    return isinstance(rewards, NaiveRewardManager) and rewards.scores_alone


class ScoreAfterRollout:
    """Scores after the rollout, even if the manager could score earlier.

    Args:
        manager: The manager; a user's own may lack `close`, and reads no agent's reward.
        config: `agent_reward`.
    """

    def __init__(self, manager: RewardManager, config: RewardConfig | None = None) -> None:
        self.manager, self._config = manager, config or RewardConfig()

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Score the requests; see `RewardManager.score`."""
        if isinstance(self.manager, NaiveRewardManager):
            return await self.manager.score(requests)
        await self.manager.score(_take_reported(requests, self._config))
        if self._config.agent_reward == "add":
            for request in requests:
                if request.reward is not None:
                    request.reward += request.agent_reward or 0.0
        return None

    async def close(self) -> None:
        """Close the manager; see `RewardManager.close`."""
        if hasattr(self.manager, "close"):
            await self.manager.close()


async def drive_and_score(
    manager: RolloutManager,
    rewards: RewardManager,
    requests: Sequence[AsyncRolloutRequest],
    *,
    on_finished: Callable[[AsyncRolloutRequest], None],
    timer: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> list[AsyncRolloutRequest]:
    """Drive requests to their ends and score them. The result has their order.

    `RolloutManager.drive` and `RewardManager.score` define the effect of a failure. Cancelling ends
    the requests and cancels the scores that are not finished.

    Args:
        manager: Rolls out.
        rewards: Scores. A `StreamingRewardManager` scores each request when it has ended, while
            others roll out, so a slow scorer costs only what is left after the rollout.
        requests: Pending requests.
        on_finished: Called with each request when it has ended, before it is scored.
        timer: Entered as `gen` for the rollout and as `reward` for the wait after it.

    Raises:
        Exception: As `RolloutManager.drive` does.
    """
    if not isinstance(rewards, StreamingRewardManager):
        with timer("gen"):
            finished = await manager.drive(requests, on_finished=on_finished)
        with timer("reward"):
            await rewards.score(finished)
        return finished

    async with rewards.scoring(requests) as scores:

        def finish(request: AsyncRolloutRequest) -> None:
            on_finished(request)
            scores.begin(request)

        with timer("gen"):
            finished = await manager.drive(requests, on_finished=finish)
        with timer("reward"):
            await scores.done()
    return finished


class _GroupScoring:
    """Scores each group in a task, when its last request has ended. An async context manager.

    So the requests of one call do not depend on a clock, and a scorer may compare the answers of a
    group.

    Args:
        score_group: Scores completed requests in place; raises nothing.
        group_sizes: Number of requests of each `uid`; None if each request is a group of its own.
        max_concurrency: Groups that are scored at once.
    """

    def __init__(
        self,
        score_group: Callable[[Sequence[AsyncRolloutRequest]], Awaitable[None]],
        group_sizes: Counter[str] | None,
        *,
        max_concurrency: int,
    ) -> None:
        self._score_group, self._group_sizes = score_group, group_sizes
        self._ended: defaultdict[str, list[AsyncRolloutRequest]] = defaultdict(list)
        self._semaphore = asyncio.Semaphore(max_concurrency)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        waiting = [task for task in self._tasks if not task.done()]
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)

    def begin(self, request: AsyncRolloutRequest) -> None:
        """Record the end of a request. After the last one of a group, score the group."""
        group = [request]
        if self._group_sizes is not None:
            group = self._ended[request.uid]
            group.append(request)
            if len(group) != self._group_sizes[request.uid]:
                return
            group.sort(key=lambda one: one.rollout_offset)
        if completed := _completed(group):
            self._tasks.append(asyncio.create_task(self._score(completed)))

    async def done(self) -> None:
        """Wait for all scores."""
        await asyncio.gather(*self._tasks)

    async def _score(self, group: Sequence[AsyncRolloutRequest]) -> None:
        async with self._semaphore:
            await self._score_group(group)


def _completed(requests: Sequence[AsyncRolloutRequest]) -> list[AsyncRolloutRequest]:
    return [request for request in requests if request.state is RequestState.COMPLETED]


@register_reward_manager("naive")
class NaiveRewardManager:
    """Scores each request by itself. Plain functions run on threads.

    Args:
        compute_score: The scorer with its `reward_kwargs` bound, or several weighted scorers.
        config: Time-out, concurrency, rate limit.
    """

    mode = ExecutionMode.THREAD
    scores_alone = True
    """Whether a score depends on its own request only. A rollout worker may compute it then."""
    arguments: Collection[str] | None = GIVEN
    """Names of the arguments of the scorer; None: not known."""

    def __init__(self, compute_score: ScoreFn, config: RewardConfig) -> None:
        self.compute_score, self._config = compute_score, config
        self._caller = ScoreCaller(compute_score, config, self.mode, self.arguments)
        self._max_concurrency = config.max_concurrent_scores

    def scoring(self, requests: Sequence[AsyncRolloutRequest]) -> _GroupScoring:
        """Open the scoring of one batch; see `StreamingRewardManager.scoring`."""
        return _GroupScoring(self._score_group, None, max_concurrency=self._max_concurrency)

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Score the completed requests; see `RewardManager.score`."""
        async with self.scoring(requests) as scores:
            for request in requests:
                scores.begin(request)
            await scores.done()

    async def close(self) -> None:
        """Release what the scorers share."""
        await self._caller.close()

    async def _score_group(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        for request in _take_reported(requests, self._config):
            try:
                score = await self._caller.score(request)
            except Exception as error:  # noqa: BLE001 - the boundary (a failed request is data)
                self._fail(request, error)
            else:
                _set_reward(request, score, self._config)

    def _fail(self, request: AsyncRolloutRequest, error: Exception) -> None:
        """Let the scoring of a request fail; name the scorer. The error of several names it."""
        failure = describe_failure(error, Fault.REWARD, turn=len(request.turns))
        if not isinstance(self.compute_score, WeightedScorers):
            name = name_of(self.compute_score, request.data_source)
            message = f"the reward function {name!r}: {failure.message}"
            failure = failure.model_copy(update={"message": message})
        request.fail_scoring(failure)


# What `dapo` adds elsewhere is a setting of every manager here: `reward.overlong_buffer`.
register_reward_manager("dapo")(NaiveRewardManager)


@register_reward_manager("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Scores each request by itself. Plain functions run in processes, which can be killed.

    Use it for scorers that compute: threads of one process compute one after another, and a thread
    cannot be stopped. `num_workers` processes serve the run; one that is late or dies is replaced.

    Args:
        compute_score: The scorer, defined at the top of a module or file: no lambda, no closure.
        config: Time-out, processes, rate limit.
    """

    mode = ExecutionMode.PROCESS


_PLURALS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
"""Argument names of a scorer of batches, by those of a scorer of one answer."""


@register_reward_manager("batch")
class BatchRewardManager(NaiveRewardManager):
    """Calls `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)`.

    The scorer gets lists of equal length and returns a list of as many numbers or dicts. With
    `reward.launch_reward_fn_async`, each call gets one group, when the last of its samples has
    ended and others still roll out. Without it, one call gets all completed requests of this rank.

    Args:
        compute_score: The scorer of batches with its `reward_kwargs` bound.
        config: Time-out of one call, rate limit, concurrency.
    """

    scores_alone = False
    arguments = tuple(_PLURALS.values())

    def scoring(self, requests: Sequence[AsyncRolloutRequest]) -> _GroupScoring:
        """Open the scoring of one batch; see `StreamingRewardManager.scoring`."""
        sizes = Counter(request.uid for request in requests)
        return _GroupScoring(self._score_group, sizes, max_concurrency=self._max_concurrency)

    async def score(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Score the completed requests in one call; see `RewardManager.score`."""
        if completed := _completed(requests):
            await self._score_group(completed)

    async def _score_group(self, requests: Sequence[AsyncRolloutRequest]) -> None:
        """Score in one call. A bad item fails its own request, a bad call all of them."""
        started = time.monotonic()
        if not (requests := _take_reported(requests, self._config)):
            return
        try:
            returned = await self._call(requests)
        except Exception as error:  # noqa: BLE001 - the boundary (a failed request is data)
            for request in requests:
                self._fail(request, error)
        else:
            for request, item in zip(requests, returned, strict=True):
                try:
                    score = contained(partial(read_score, item))
                except Exception as error:  # noqa: BLE001 - the same boundary
                    self._fail(request, error)
                else:
                    _set_reward(request, score, self._config)
        seconds = time.monotonic() - started
        for request in requests:
            request.metrics["seconds_reward"] = seconds
            request.metrics["seconds_reward_started"] = unix_time(started)

    async def _call(self, requests: Sequence[AsyncRolloutRequest]) -> list[Any]:
        each = [make_arguments(request) for request in requests]
        lists = {name: [one[single] for one in each] for single, name in _PLURALS.items()}
        returned = await self._caller.call(self.compute_score, lists)
        return contained(partial(_read_items, returned, len(each)))


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


def _take_reported(
    requests: Sequence[AsyncRolloutRequest], config: RewardConfig
) -> list[AsyncRolloutRequest]:
    """Set the rewards that agents reported, under `agent_reward: replace`; return the others."""
    rest: list[AsyncRolloutRequest] = []
    for request in requests:
        reported = request.agent_reward
        if reported is None or config.agent_reward != "replace":
            rest.append(request)
        elif request.state is RequestState.COMPLETED:
            _set_reward(request, Score(reported, {"acc": reported}), config)
    return rest


def _set_reward(request: AsyncRolloutRequest, score: Score, config: RewardConfig) -> None:
    """Set a request's reward; fail it if a reward of a tool or turn is no finite number."""
    try:
        for name, reward in request.tool_rewards.items():
            check_number(reward, f"the reward of the tool {name!r}")
        for turn in request.turns:
            for reward in (turn.reward, *(call.reward for call in turn.calls)):
                if reward is not None:
                    check_number(reward, f"a reward of turn {turn.index}")
    except RewardError as error:
        request.fail_scoring(describe_failure(error, Fault.REWARD, turn=len(request.turns)))
    else:
        request.reward, request.reward_extra_info = score.value, score.extra
        if request.agent_reward is not None:
            request.reward_extra_info["agent_reward"] = request.agent_reward
            if config.agent_reward == "add":
                request.reward += request.agent_reward
