"""From a finished request to its rewards, and from those to rewards of tokens. Plain numbers."""

from agentrl.rewards.batch_manager import BatchRewardManager
from agentrl.rewards.combination import CombinedReward, RewardPart, Source, combine_rewards
from agentrl.rewards.launch import drive_and_score
from agentrl.rewards.manager import (
    LaunchingManager,
    RewardManager,
    Scoring,
    get_reward_manager,
    make_reward_manager,
    register_reward_manager,
)
from agentrl.rewards.managers import NaiveRewardManager, PrimeRewardManager
from agentrl.rewards.placement import PlacedReward, RewardPlacement, place_rewards
from agentrl.rewards.sources import default_compute_score, find_scorer

__all__ = [
    "BatchRewardManager",
    "CombinedReward",
    "LaunchingManager",
    "NaiveRewardManager",
    "PlacedReward",
    "PrimeRewardManager",
    "RewardManager",
    "RewardPart",
    "RewardPlacement",
    "Scoring",
    "Source",
    "combine_rewards",
    "default_compute_score",
    "drive_and_score",
    "find_scorer",
    "get_reward_manager",
    "make_reward_manager",
    "place_rewards",
    "register_reward_manager",
]
