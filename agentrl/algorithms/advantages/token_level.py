"""Generalized advantage estimation along tokens. Shapes: B rows, T positions, N trained tokens."""

import torch
from torch.nn.functional import pad

from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.masked import (
    WHITENING_EPSILON,
    TrainedTokens,
    compute_discounted_sums,
    masked_whiten,
)
from agentrl.config.schema.run import AlgorithmConfig


@register_adv_est("gae")
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh how much better each token went than the critic expected, over all horizons.

    delta[t] = r[t] + gamma * V[t + 1] - V[t]; A[t] = delta[t] + gamma * lam * A[t + 1], where t + 1
    is the next *trained* token: neither time nor values pass on observations. The advantages are
    then whitened over the batch's trained tokens.

    Source: Schulman et al. 2016 (arXiv 1506.02438), equations 11, 12 and 16.

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        values: `[B, T]`, the critic's value of the state before each token.
        response_mask: `[B, T]`, nonzero where a token is trained.
        gamma: Discount per trained token.
        lam: From 0 (one step, trusts the critic) to 1 (the whole return).

    Returns:
        Advantages, whitened, and returns (advantage before whitening + value: what the critic
        learns), both `[B, T]`; 0 on masked positions.
    """
    tokens = TrainedTokens.of(response_mask)
    known = tokens.pack(values)
    rewards = tokens.pack(token_level_rewards)
    advantages = compute_gae(rewards, known, gamma, lam)
    taken = tokens.take_packed(advantages)
    whitened = masked_whiten(taken, torch.ones_like(taken))
    return tokens.place(whitened), tokens.unpack(advantages + known)


@register_adv_est("gae_verl")
def compute_gae_verl_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `gae`, and leave on masked tokens what the reference leaves there.

    A masked token has the advantage of the next trained one, shifted and scaled like the others,
    and the return of that advantage and its own value. A batch in which nothing is trained has no
    mean to take off: advantages are NaN, and torch warns. For comparisons with the reference.
    """
    mask = response_mask.bool()
    tokens = TrainedTokens.of(response_mask)
    rewards = tokens.pack(token_level_rewards)
    advantages = compute_gae(rewards, tokens.pack(values), gamma, lam)
    trained_before = mask.cumsum(dim=-1) - mask.long()
    everywhere = pad(advantages, (0, 1)).gather(1, trained_before)
    kept = advantages[tokens.present]
    whitened = (everywhere - kept.mean()) * (kept.var() + WHITENING_EPSILON).rsqrt()
    return whitened, everywhere + values


def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Advantages of steps without gaps, `[B, N]`, not whitened.

    Args:
        rewards: `[B, N]`, 0 behind a row's last step.
        values: `[B, N]`, before each step; 0 behind a row's last step.
        gamma: Discount per step.
        lam: Decay of the horizon.
    """
    following = pad(values[:, 1:], (0, 1))
    return compute_discounted_sums(rewards + gamma * following - values, gamma * lam)


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
