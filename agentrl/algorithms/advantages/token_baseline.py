"""A baseline for each token that weighs samples by their gradients' variance.

Shapes: B rows, T response positions, N trained tokens of the longest row, G groups.
"""

from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, Groups, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.advantages.token_level import compute_returns_to_go
from agentrl.algorithms.masked import TrainedTokens, compute_discounted_sums


@register_adv_est("optimal_token_baseline")
def compute_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Take off each token's return the group's mean, weighted by the variance so far.

    A[t] = G[t] - B[t], with B[t] = sum of W[t] * G[t] / (sum of W[t] + epsilon) over the group,
    t counting trained tokens; G[t] is the sum of the rewards from t on, and W[t] the sum up to t of
    w = 1 - 2 pi + sum of pi^2 over the vocabulary, the squared norm of the gradient with respect to
    the logits. A group whose scores are all equal, or in which one row counts, gives exactly 0
    (equal rewards train nothing).

    Nine parameters, because this is the reference's signature.

    Source: Li et al. 2026 (arXiv 2602.07078).

    Args:
        token_level_rewards: `[B, T]`; only what stands on trained tokens counts.
        response_mask: `[B, T]`, nonzero where a token is trained.
        index: `[B]`, the group of each row.
        old_log_probs: `[B, T]`, of the sampled tokens.
        sum_pi_squared: `[B, T]`, sum of the squared probabilities of the vocabulary.
        rollout_is_weights: `[B, T]`, importance weights; their squares weigh w. None: no weights.
        handle_zero_tail: Whether the tokens that only the longest row of a group has are left
            without a baseline. Otherwise the row is its own baseline there: about 0.
        epsilon: Added to the sum of the weights.
        in_baseline: `[B]` bool, rows that the group's statistics count; the others, and rows in
            which nothing is trained, are as if they were not there. None: all rows.

    Returns:
        Advantages and returns-to-go, `[B, T]`; 0 on masked positions.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    tokens = TrainedTokens.of(response_mask)
    returns = compute_discounted_sums(tokens.pack(token_level_rewards).double(), 1.0)
    energies = _trained_energies(tokens, old_log_probs, sum_pi_squared, rollout_is_weights)
    paths = _Paths(returns, energies, tokens.present, scored.groups)
    relative = paths.advantages(epsilon, handle_zero_tail=handle_zero_tail)
    relative = torch.where(scored.is_silent()[:, None], 0.0, relative)
    return tokens.unpack(relative.to(scored.dtype)), tokens.unpack(returns.to(scored.dtype))


# The reference has a second one for several turns, because its first one counts padded positions.
register_adv_est("tir_optimal_token_baseline")(compute_optimal_token_baseline_advantage)


@register_adv_est("optimal_token_baseline_verl")
def compute_optimal_token_baseline_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> AdvantagesAndReturns:
    """Do as `optimal_token_baseline`, position by padded position, as the reference does.

    Tokens are compared that have the same number of tokens before them, observed ones included. A
    group of one trains on its returns, equal scores on what rounding and `handle_zero_tail` leave,
    and masked tokens have returns. For comparisons with the reference.
    """
    mask = response_mask.bool()
    returns = compute_returns_to_go(token_level_rewards.double(), mask)
    energies = _energies(old_log_probs, sum_pi_squared, rollout_is_weights)
    groups = Groups.of(index, torch.ones_like(mask[:, 0]))
    paths = _Paths(returns, torch.where(mask, energies, 0.0), mask, groups)
    relative = paths.advantages(epsilon, handle_zero_tail=handle_zero_tail)
    dtype = token_level_rewards.dtype
    return relative.to(dtype), returns.to(dtype)


@register_adv_est("tir_optimal_token_baseline_verl")
def compute_tir_optimal_token_baseline_verl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> AdvantagesAndReturns:
    """Do as `tir_optimal_token_baseline`, and as the reference where a group says nothing.

    A group of one trains on its returns, equal scores on what rounding and `handle_zero_tail`
    leave, and masked tokens have returns. For comparisons with the reference.
    """
    mask, tokens = response_mask.bool(), TrainedTokens.of(response_mask)
    everywhere = compute_returns_to_go(token_level_rewards.double(), mask)
    returns = tokens.pack(everywhere)
    energies = _trained_energies(tokens, old_log_probs, sum_pi_squared, rollout_is_weights)
    groups = Groups.of(index, mask.any(dim=-1))
    paths = _Paths(returns, energies, tokens.present, groups)
    relative = paths.advantages(epsilon, handle_zero_tail=handle_zero_tail)
    dtype = token_level_rewards.dtype
    return tokens.unpack(relative).to(dtype), everywhere.to(dtype)


@dataclass(frozen=True, slots=True)
class _Paths:
    """What each row earned from each place on, and how much its gradient varied; any width N."""

    returns: torch.Tensor
    """`[B, N]` float64: return-to-go."""
    energies: torch.Tensor
    """`[B, N]` float64: squared gradient norm; 0 where no token is."""
    present: torch.Tensor
    """`[B, N]` bool: where a trained token is."""
    groups: Groups

    def advantages(self, epsilon: float, *, handle_zero_tail: bool) -> torch.Tensor:
        """`[B, N]`: returns less the group's weighted mean at each place; 0 where no token is.

        A row without others has no mean, and keeps its returns.
        """
        weights = torch.where(self.present, self.energies.cumsum(dim=-1), 0.0)
        means = self._sum(weights * self.returns) / (self._sum(weights) + epsilon)
        unopposed = (self.groups.count() == 1)[self.groups.rows, None]
        if handle_zero_tail:
            unopposed = unopposed | self._is_tail()
        baselines = torch.where(unopposed, 0.0, means[self.groups.rows])
        return torch.where(self.present, self.returns - baselines, 0.0)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """`[G, N]`: sum over the rows that count."""
        zeros = values.new_zeros(self.groups.num, values.shape[1])
        return zeros.index_add(
            0, self.groups.rows, torch.where(self.groups.counted[:, None], values, 0.0)
        )

    def _is_tail(self) -> torch.Tensor:
        """`[B, N]` bool: places behind the second-longest row, in the one row that is longer."""
        lengths, rows = self.present.sum(dim=-1).double(), self.groups.rows
        longest = lengths == self.groups.max(lengths)[rows]
        is_only = longest & (self.groups.sum(longest.double())[rows] == 1)
        second = self.groups.max(torch.where(longest, 0.0, lengths))[rows]
        places = torch.arange(self.present.shape[1], device=lengths.device)
        return is_only[:, None] & (places >= second[:, None])


def _trained_energies(
    tokens: TrainedTokens,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
) -> torch.Tensor:
    """`[B, N]` float64: `_energies` of the trained tokens, side by side."""
    weights = None if rollout_is_weights is None else tokens.take(rollout_is_weights)
    taken = _energies(tokens.take(old_log_probs), tokens.take(sum_pi_squared), weights)
    return tokens.pack_taken(taken)


def _energies(
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Squared norm of the gradient with respect to the logits, by token, in float64."""
    norms = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    weighted = norms if rollout_is_weights is None else norms * rollout_is_weights.square()
    return weighted.double()
