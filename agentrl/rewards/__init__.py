"""From a finished request to its rewards, and from those to rewards of tokens. Plain numbers."""

from agentrl.rewards.combination import CombinedReward, RewardPart, Source, combine_rewards
from agentrl.rewards.manager import (
    RewardManager,
    get_reward_manager,
    make_reward_manager,
    register_reward_manager,
)
from agentrl.rewards.placement import PlacedReward, RewardPlacement, place_rewards
from agentrl.rewards.sources import default_compute_score, find_scorer

__all__ = [
    "CombinedReward",
    "PlacedReward",
    "RewardManager",
    "RewardPart",
    "RewardPlacement",
    "Source",
    "combine_rewards",
    "default_compute_score",
    "find_scorer",
    "get_reward_manager",
    "make_reward_manager",
    "place_rewards",
    "register_reward_manager",
]
