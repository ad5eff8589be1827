"""Score finished requests, combine their rewards, and place them on tokens. No tensors."""

from agentrl.rewards.combination import CombinedReward, RewardPart, Source, combine_rewards
from agentrl.rewards.managers import (
    BatchRewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    RewardManager,
    Scoring,
    StreamingRewardManager,
    drive_and_score,
    get_reward_manager,
    make_reward_manager,
    register_reward_manager,
)
from agentrl.rewards.placement import PlacedReward, RewardPlacement, place_rewards
from agentrl.rewards.sources import default_compute_score, find_scorer

__all__ = [
    "BatchRewardManager",
    "CombinedReward",
    "NaiveRewardManager",
    "PlacedReward",
    "PrimeRewardManager",
    "RewardManager",
    "RewardPart",
    "RewardPlacement",
    "Scoring",
    "Source",
    "StreamingRewardManager",
    "combine_rewards",
    "default_compute_score",
    "drive_and_score",
    "find_scorer",
    "get_reward_manager",
    "make_reward_manager",
    "place_rewards",
    "register_reward_manager",
]
