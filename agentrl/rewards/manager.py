"""What a reward manager is; managers are found by name."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar, runtime_checkable

from agentrl.config.schema.run import RewardConfig
from agentrl.plugins.registry import Registry
from agentrl.rewards.loading import bundled_in, load_scorers
from agentrl.rewards.scoring import ScoreFn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.sandbox.shared import check_sandbox


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
class LaunchingManager(Protocol):
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
    launches = config.launch_reward_fn_async and isinstance(made, LaunchingManager)
    return made if launches else ScoringBehind(made)


class ScoringBehind:
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
