"""`verl.workers.reward_manager.abstract`: the base class of verl's reward managers."""

from collections.abc import Callable
from typing import Any


class AbstractRewardManager:
    """A manager that scores a whole `DataProto`; it can be defined here, and not be chosen.

    agentrl's managers score finished requests (`agentrl.rewards.RewardManager`).
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        """Take what verl hands over."""

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Score a batch."""
        raise NotImplementedError
