"""`verl.utils.reward_score.prime_math`."""

from agentrl.compat.verl.utils.reward_score.math_reward import compute_score

__all__ = ["compute_score"]
