"""The optimal token baseline: a group mean for each token, weighted by the gradients' variance.

Shapes: B rows, T response positions, N trained tokens of the longest row, G groups.
"""

from dataclasses import dataclass

import numpy as np
import torch

from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, Groups, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.algorithms.masked import TrainedTokenIndex, compute_discounted_sums


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
    """Subtract from each token's return its group's mean, weighted by the variance so far.

    A[t] = G[t] - B[t], with B[t] = sum of W[t] * G[t] / (sum of W[t] + epsilon) over the group,
    t counting trained tokens; G[t] is the sum of the rewards from t on, and W[t] the sum up to t of
    w = 1 - 2 pi + sum of pi^2 over the vocabulary, the squared norm of the gradient with respect to
    the logits. A group of equal scores, or in which one row counts, gives exactly 0.

    The nine parameters are verl's signature.

    Source: Li et al. 2026 (arXiv 2602.07078).

    Args:
        token_level_rewards: `[B, T]`; only rewards on trained tokens count.
        response_mask: `[B, T]`, nonzero at trained tokens.
        index: `[B]`, the group of each row.
        old_log_probs: `[B, T]`, of the sampled tokens.
        sum_pi_squared: `[B, T]`, sum of the squared probabilities of the vocabulary.
        rollout_is_weights: `[B, T]`, importance weights; w is multiplied by their squares. None: no
            weights.
        handle_zero_tail: Whether tokens that only the longest row of a group has get no baseline.
            Otherwise this row is its own baseline there, and the advantage is about 0.
        epsilon: Added to the sum of the weights.
        in_baseline: `[B]` bool, rows that the group's statistics count. The others, and rows
            without a trained token, have no effect on them. None: all rows.

    Returns:
        Advantages and returns-to-go, `[B, T]`; 0 at masked positions.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    tokens = TrainedTokenIndex.of(response_mask)
    returns = compute_discounted_sums(tokens.pack(token_level_rewards).double(), 1.0)
    norms = packed_gradient_norms(tokens, old_log_probs, sum_pi_squared, rollout_is_weights)
    baseline = TokenBaseline(returns, norms, tokens.present, scored.groups)
    relative = baseline.advantages(epsilon, handle_zero_tail=handle_zero_tail)
    relative = torch.where(scored.is_silent()[:, None], 0.0, relative)
    return tokens.unpack(relative.to(scored.dtype)), tokens.unpack(returns.to(scored.dtype))


# verl has a second one for several turns, because its first one counts padded positions.
register_adv_est("tir_optimal_token_baseline")(compute_optimal_token_baseline_advantage)


@dataclass(frozen=True, slots=True)
class TokenBaseline:
    """The data of one baseline per group and position; any width N."""

    returns: torch.Tensor
    """`[B, N]` float64: return-to-go."""
    norms: torch.Tensor
    """`[B, N]` float64: squared gradient norm; 0 without a token."""
    present: torch.Tensor
    """`[B, N]` bool: true at trained tokens."""
    groups: Groups

    def advantages(self, epsilon: float, *, handle_zero_tail: bool) -> torch.Tensor:
        """Return `[B, N]`: returns minus the group's weighted mean at each position.

        0 without a token. The only row of a group has no mean, and keeps its returns.
        """
        weights = torch.where(self.present, self.norms.cumsum(dim=-1), 0.0)
        means = self._sum(weights * self.returns) / (self._sum(weights) + epsilon)
        without_baseline = (self.groups.count() == 1)[self.groups.rows, None]
        if handle_zero_tail:
            without_baseline = without_baseline | self._is_tail()
        baselines = torch.where(without_baseline, 0.0, means[self.groups.rows])
        return torch.where(self.present, self.returns - baselines, 0.0)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[G, N]`: the sum over the rows that count."""
        zeros = values.new_zeros(self.groups.num, values.shape[1])
        counted = torch.where(self.groups.counted[:, None], values, 0.0)
        return zeros.index_add(0, self.groups.rows, counted)

    def _is_tail(self) -> torch.Tensor:
        """Return `[B, N]` bool: positions of a sole longest row after the second-longest row."""
        lengths, rows = self.present.sum(dim=-1).double(), self.groups.rows
        longest = lengths == self.groups.max(lengths)[rows]
        is_only = longest & (self.groups.sum(longest.double())[rows] == 1)
        second = self.groups.max(torch.where(longest, 0.0, lengths))[rows]
        positions = torch.arange(self.present.shape[1], device=lengths.device)
        return is_only[:, None] & (positions >= second[:, None])


def packed_gradient_norms(
    tokens: TrainedTokenIndex,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Return `squared_gradient_norms` of the trained tokens, packed to `[B, N]`."""
    weights = None if rollout_is_weights is None else tokens.take(rollout_is_weights)
    return tokens.pack_taken(
        squared_gradient_norms(tokens.take(old_log_probs), tokens.take(sum_pi_squared), weights)
    )


def squared_gradient_norms(
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Return each token's squared norm of the gradient with respect to the logits, in float64."""
    norms = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    weighted = norms if rollout_is_weights is None else norms * rollout_is_weights.square()
    return weighted.double()
