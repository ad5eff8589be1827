"""`verl.workers.reward_manager`: names of reward managers."""

from agentrl.compat.verl.workers.reward_manager.abstract import AbstractRewardManager
from agentrl.compat.verl.workers.reward_manager.registry import get_reward_manager_cls, register
from agentrl.rewards import BatchRewardManager, NaiveRewardManager, PrimeRewardManager

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "get_reward_manager_cls",
    "register",
]
