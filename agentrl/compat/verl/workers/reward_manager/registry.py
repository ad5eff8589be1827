"""`verl.workers.reward_manager.registry`: register a manager by name, and find it."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from agentrl.errors import ConfigError
from agentrl.rewards.managers import get_reward_manager, register_reward_manager

M = TypeVar("M", bound=type)

REWARD_MANAGER_REGISTRY: dict[str, type] = {}
"""The classes that `register` was given."""


def register(name: str) -> Callable[[M], M]:
    """Decorate a manager, so that `reward.manager` finds it by name.

    A class without agentrl's `score` can be defined and registered, and not be chosen.
    """

    def put(found: M) -> M:
        other = REWARD_MANAGER_REGISTRY.get(name)
        if other is not None and other is not found:
            raise ValueError(f"the reward manager {name!r} is {other} already, not {found}")
        if other is None:
            register_reward_manager(name)(found if hasattr(found, "score") else _refusing(found))
        REWARD_MANAGER_REGISTRY[name] = found
        return found

    return put


def get_reward_manager_cls(name: str) -> Any:
    """Find a manager by name.

    Raises:
        ConfigError: for an unknown name.
    """
    return REWARD_MANAGER_REGISTRY.get(name) or get_reward_manager(name)


def _refusing(found: type) -> Callable[..., NoReturn]:
    def refuse(*args: Any) -> NoReturn:
        raise ConfigError(
            f"the reward manager {found.__name__} scores a DataProto, as verl's do",
            key="reward.manager",
            expected="a bundled manager and its scoring in reward.custom_reward_function; or a "
            "class with `async def score(self, requests)` (docs/rewards.md)",
        )

    return refuse
