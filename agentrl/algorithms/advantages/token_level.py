"""Estimators along tokens: GAE, REINFORCE++, ReMax. Shapes: B rows, T positions, N trained tokens.

Time counts trained tokens: t + 1 is the next *trained* token, and observations take no time.
"""

import torch
from torch.nn.functional import pad

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.masked import (
    TrainedTokenIndex,
    compute_discounted_sums,
    whiten,
    zero_masked,
)
from agentrl.config.schema.training import AlgorithmConfig


@register_adv_est("gae")
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> AdvantagesAndReturns:
    """Compute generalized advantages, whitened over the batch's trained tokens.

    delta[t] = r[t] + gamma * V[t + 1] - V[t]; A[t] = delta[t] + gamma * lam * A[t + 1].

    Source: Schulman et al. 2016 (arXiv 1506.02438), equations 11, 12 and 16.

    Args:
        token_level_rewards: `[B, T]`; only rewards on trained tokens count.
        values: `[B, T]`, the critic's value of the state before each token.
        response_mask: `[B, T]`, nonzero at trained tokens.
        gamma: Discount per trained token.
        lam: From 0 (one step, trusts the critic) to 1 (the whole return).

    Returns:
        Advantages, whitened, and returns (advantage before whitening + value: what the critic
        learns), both `[B, T]`; 0 at masked positions.
    """
    tokens = TrainedTokenIndex.of(response_mask)
    advantages, returns = [], torch.empty_like(values)
    for rows, block in tokens.split():
        known = block.take(values[rows])
        following = block.following(known)
        deltas = block.take(token_level_rewards[rows]).add_(following, alpha=gamma).sub_(known)
        advantages.append(block.sum_discounted(deltas, gamma * lam))
        returns[rows] = block.put(advantages[-1] + known)
    return tokens.put(whiten(torch.cat([values.new_empty(0), *advantages]))), returns


def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Return the advantages of steps without gaps, `[B, N]`, not whitened.

    Args:
        rewards: `[B, N]`, 0 after a row's last step.
        values: `[B, N]`, before each step; 0 after a row's last step.
        gamma: Discount per step.
        lam: Decay of the horizon.
    """
    following = pad(values[:, 1:], (0, 1))
    deltas = torch.add(rewards, following, alpha=gamma).sub_(values)
    return compute_discounted_sums(deltas, gamma * lam)


@register_adv_est("reinforce_plus_plus", reads=("gamma",))
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: AlgorithmConfig
) -> AdvantagesAndReturns:
    """Compare each token's discounted return with those of the whole batch.

    G[t] = r[t] + gamma * G[t + 1]; the advantages are the returns whitened over the batch's trained
    tokens. If all returns are equal, the advantages are 0.

    Source: Hu 2025 (arXiv 2501.03262), section 3, without its KL term, which agentrl subtracts from
    the rewards (`algorithm.use_kl_in_reward`).

    Args:
        token_level_rewards: `[B, T]`; only rewards on trained tokens count.
        response_mask: `[B, T]`, nonzero at trained tokens.
        config: Its `gamma` is the discount per trained token.

    Returns:
        Advantages and returns, `[B, T]`; 0 at masked positions.
    """
    tokens = TrainedTokenIndex.of(response_mask)
    rewards = token_level_rewards
    sums = [b.sum_discounted(b.take(rewards[rows]), config.gamma) for rows, b in tokens.split()]
    taken = torch.cat([rewards.new_empty(0), *sums])
    return tokens.put(whiten(taken)), tokens.put(taken)


@register_adv_est("remax")
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor, reward_baselines: torch.Tensor, response_mask: torch.Tensor
) -> AdvantagesAndReturns:
    """Compare each token's return with the score of the greedy answer to the same prompt.

    A[t] = (sum of the rewards from t on) - baseline. The greedy rollout does not depend on the
    sample, so the baseline adds no bias.

    Source: Li et al. 2023 (arXiv 2310.10505), section 4, algorithm 2.

    Args:
        token_level_rewards: `[B, T]`; only rewards on trained tokens count.
        reward_baselines: `[B]`, the score of the greedy rollout of each row's prompt.
        response_mask: `[B, T]`, nonzero at trained tokens.

    Returns:
        Advantages and returns, `[B, T]`; 0 at masked positions.
    """
    mask = response_mask.bool()
    returns = compute_returns_to_go(token_level_rewards, mask)
    return zero_masked(returns - reward_baselines[:, None], mask), zero_masked(returns, mask)


def compute_returns_to_go(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum the trained tokens' rewards from each position on, masked positions included, `[B, T]`.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]` bool.
    """
    return compute_discounted_sums(zero_masked(rewards, mask), 1.0)
