"""Reward managers of verl 0.6.1: classes that score a whole `DataProto`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np
from omegaconf import OmegaConf

from agentrl.collate import collate
from agentrl.compat.scoring import default_compute_score
from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import RewardError
from agentrl.plugins.call import contained
from agentrl.protocol import DataProto, object_array
from agentrl.rewards.managers import (
    BatchRewardManager,
    check_manager_kwargs,
    get_reward_manager,
    register_reward_manager,
)
from agentrl.rewards.scoring import ScoreFn
from agentrl.rollout.request import AsyncRolloutRequest

M = TypeVar("M", bound=type)
RawRewardFn = Callable[..., Any]
REWARD_MANAGER_REGISTRY: dict[str, type] = {}
"""The classes that `register` was given."""


class AbstractRewardManager:
    """Base class of managers that score a whole `DataProto`.

    `register` makes a subclass usable by `reward.manager`. A call gets the finished samples of a
    step (with `reward.launch_reward_fn_async`, of a group) and returns `reward_tensor`, `[B, T]`.
    The sum of a row is the reward of its sample; `reward.placement` chooses its tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        """Accept the arguments that verl passes."""

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Score a batch."""
        raise NotImplementedError


def register(name: str) -> Callable[[M], M]:
    """Decorate a manager, so that `reward.manager` finds it by name.

    A class of the user replaces a bundled one of the same name, with a note.
    """

    def put(found: M) -> M:
        other = REWARD_MANAGER_REGISTRY.get(name)
        if other is not None and other.__qualname__ != found.__qualname__:
            raise ValueError(f"the reward manager {name!r} is {other} already, not {found}")
        register_reward_manager(name)(found if hasattr(found, "score") else _over_batches(found))
        REWARD_MANAGER_REGISTRY[name] = found
        return found

    return put


def get_reward_manager_cls(name: str) -> Any:
    """Find a manager by name.

    Raises:
        ConfigError: for an unknown name.
    """
    return REWARD_MANAGER_REGISTRY.get(name) or get_reward_manager(name)


def _over_batches(found: type) -> Any:
    """Return a factory of agentrl's managers for a class of verl's."""

    @wraps(found, updated=())
    def make(
        compute_score: ScoreFn, config: RewardConfig, tokenizer: Any, **kwargs: Any
    ) -> BatchRewardManager:
        custom = compute_score if config.custom_reward_function else default_compute_score
        given = {
            "tokenizer": tokenizer,
            "num_examine": 0,
            "compute_score": custom,
            "reward_fn_key": "data_source",
            **dict(OmegaConf.create(kwargs)),
        }
        check_manager_kwargs(found, (), given, config.manager)
        return _DataProtoManager(compute_score, config, found(**given), tokenizer)

    del make.__wrapped__  # its signature is its own, not that of the class
    return make


class _DataProtoManager(BatchRewardManager):
    """Collates requests, calls verl's manager on a thread, and reads its tensor."""

    arguments = None

    def __init__(
        self, compute_score: ScoreFn, config: RewardConfig, manager: Any, tokenizer: Any
    ) -> None:
        super().__init__(compute_score, config)
        self._manager = manager
        self._pad_token_id = int(tokenizer.pad_token_id or 0)

    async def _call(self, requests: Sequence[AsyncRolloutRequest]) -> list[Any]:
        arguments = {"data": _collate(requests, self._pad_token_id), "return_dict": True}
        returned = await self._caller.call(self._manager, arguments)
        return contained(partial(_read_rewards, returned, len(requests)))


def _collate(requests: Sequence[AsyncRolloutRequest], pad_token_id: int) -> DataProto:
    """Make the batch that verl's managers read: a row for each request, with its last sequence."""
    whole = collate(requests, pad_token_id=pad_token_id)
    ends = accumulate(len(request.sequences) for request in requests)
    data = whole.select_idxs([end - 1 for end in ends])
    truths = [{"style": "rule", "ground_truth": request.ground_truth} for request in requests]
    data.non_tensor_batch |= {
        "reward_model": object_array(truths),
        "extra_info": object_array([dict(request.extra_info) for request in requests]),
        "__num_turns__": np.array([request.num_turns for request in requests], np.int32),
    }
    return data


def _read_rewards(returned: Any, num_requests: int) -> list[Any]:
    found = cast("Mapping[str, Any]", returned if isinstance(returned, Mapping) else {})
    tensor = found.get("reward_tensor") if found else returned
    if getattr(tensor, "shape", (None,))[0] != num_requests:
        raise RewardError(
            f"the reward manager returned {returned!r:.200}",
            expected=f"`reward_tensor` with {num_requests} rows",
        )
    extra = {
        name: list(values)
        for name, values in dict(found.get("reward_extra_info") or {}).items()
        if len(values) == num_requests
    }
    sums = cast("Any", tensor).reshape(num_requests, -1).sum(-1).tolist()
    return [
        {**{name: values[row] for name, values in extra.items()}, "score": total}
        for row, total in enumerate(sums)
    ]
