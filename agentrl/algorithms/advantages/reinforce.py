"""Returns without a critic, along tokens. Shapes: B rows, T positions, N trained tokens."""

import torch

from agentrl.algorithms.advantages.discounting import compute_discounted_sums
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.advantages.trained_tokens import TrainedTokens
from agentrl.algorithms.masked import masked_whiten
from agentrl.config.schema.run import AlgorithmConfig


@register_adv_est("reinforce_plus_plus", reads=("gamma",))
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: AlgorithmConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare each token's discounted return with those of the whole batch.

    G[t] = r[t] + gamma * G[t + 1], where t + 1 is the next trained token; the advantages are the
    returns whitened over the batch's trained tokens. Where all returns are equal they are 0.

    Source: Hu 2025 (arXiv 2501.03262), section 3, without its KL term, which agentrl takes off the
    rewards (`algorithm.use_kl_in_reward`).

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        response_mask: `[B, T]`, nonzero where a token is trained.
        config: Of which `gamma` is read, the discount per trained token.

    Returns:
        Advantages and returns, `[B, T]`; 0 on masked positions.
    """
    tokens = TrainedTokens.of(response_mask)
    rewards = tokens.pack(token_level_rewards)
    returns = compute_discounted_sums(rewards, config.gamma)
    taken = tokens.take_packed(returns)
    return tokens.place(masked_whiten(taken, torch.ones_like(taken))), tokens.place(taken)


@register_adv_est("remax")
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    reward_baselines: torch.Tensor,
    response_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare each token's return with the score of the greedy answer to the same prompt.

    A[t] = (sum of the rewards from t on) - baseline. The greedy rollout does not depend on what was
    sampled, so the baseline adds no bias.

    Source: Li et al. 2023 (arXiv 2310.10505), section 4, algorithm 2.

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        reward_baselines: `[B]`, the score of the greedy rollout of each row's prompt.
        response_mask: `[B, T]`, nonzero where a token is trained.

    Returns:
        Advantages and returns, `[B, T]`; 0 on masked positions.
    """
    mask = response_mask.bool()
    returns = compute_returns_to_go(token_level_rewards, mask)
    advantages = torch.where(mask, returns - reward_baselines[:, None], 0.0)
    return advantages, torch.where(mask, returns, 0.0)


@register_adv_est("remax_verl")
def compute_remax_verl_outcome_advantage(
    token_level_rewards: torch.Tensor,
    reward_baselines: torch.Tensor,
    response_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `remax`, and give masked tokens the return of what follows, as the reference does.

    Their advantage is that return without a baseline. For comparisons with the reference.
    """
    mask = response_mask.bool()
    returns = compute_returns_to_go(token_level_rewards, mask)
    return returns - torch.where(mask, reward_baselines[:, None], 0.0), returns


def compute_returns_to_go(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum the trained tokens' rewards from each position on, on masked positions too.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]` bool.

    Returns:
        `[B, T]`.
    """
    return compute_discounted_sums(torch.where(mask, rewards, 0.0), 1.0)
