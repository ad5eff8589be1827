"""GDPO: several rewards, each normalized by itself. Shapes: B rows, T positions, K rewards."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from agentrl.algorithms.advantages.group_relative import relative_scores
from agentrl.algorithms.advantages.groups import AdvantagesAndReturns, GroupScores
from agentrl.algorithms.advantages.registry import register_adv_est
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.errors import ConfigError

_KEYS = "algorithm.gdpo_reward_keys"
_WEIGHTS = "algorithm.gdpo_reward_weights"


@register_adv_est("gdpo", reads=("gdpo_reward_keys", "gdpo_reward_weights"), reward_unit="named")
def compute_gdpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray | torch.Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
    non_tensor_batch: Mapping[str, np.ndarray] | None = None,
    in_baseline: torch.Tensor | None = None,
) -> AdvantagesAndReturns:
    """Normalize each reward in its group, sum with weights, whiten over the batch's tokens.

    A = whiten(sum over k of w_k A_k), A_k the advantage of `grpo` for the reward k alone. So a
    reward with a wide range does not hide one with a narrow range, and samples with the same sum
    of different rewards keep different advantages. A group in which the values of each reward are
    equal, or in which one row counts, gives exactly 0.

    Source: Liu et al. 2026 (arXiv 2601.05242).

    Args:
        token_level_rewards: `[B, T]`; without a configuration, their sum is the only reward.
        response_mask: As in `grpo`.
        index: As in `grpo`.
        epsilon: As in `grpo`.
        norm_adv_by_std_in_grpo: As in `grpo`.
        config: Names of the rewards in `gdpo_reward_keys`, their weights in `gdpo_reward_weights`
            (empty: 1 each).
        non_tensor_batch: The rewards, in `reward_extra_info` `[B]` (the scorer's dicts), or in
            columns `[B]` of numbers named like the keys.
        in_baseline: As in `grpo`. Rows that do not count need no rewards.

    Returns:
        As `grpo`.

    Raises:
        ConfigError: without keys, for a key that is missing or not a number in a row, and if the
            numbers of keys and weights differ.
    """
    scored = GroupScores.of(token_level_rewards, response_mask, index, in_baseline)
    rewards, weights = read_rewards(scored, config, non_tensor_batch)
    return scored.spread(
        combine_rewards(scored, rewards, weights, epsilon if norm_adv_by_std_in_grpo else None)
    )


def combine_rewards(
    scored: GroupScores, rewards: torch.Tensor, weights: torch.Tensor, epsilon: float | None
) -> torch.Tensor:
    """Compute the advantage of each row from its rewards.

    Args:
        scored: The rows.
        rewards: `[K, B]` float64.
        weights: `[K]` float64.
        epsilon: Added to the standard deviation; None: only center.

    Returns:
        `[B]` float64.
    """
    each = [scored.with_scores(reward) for reward in rewards]
    parts = [relative_scores(one, epsilon) for one in each]
    whitened = scored.whiten(weights @ torch.stack(parts))
    is_silent = torch.stack([one.is_silent() for one in each]).all(dim=0)
    return torch.where(is_silent, 0.0, whitened)


def read_rewards(
    scored: GroupScores,
    config: AlgorithmConfig | None,
    non_tensor_batch: Mapping[str, np.ndarray] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rewards, `[K, B]`, and their weights, `[K]`, both float64.

    Without a configuration, the score is the only reward.

    Raises:
        ConfigError: see `compute_gdpo_outcome_advantage`.
    """
    if config is None or non_tensor_batch is None:
        return scored.scores[None].double(), scored.scores.new_ones(1).double()
    keys = config.gdpo_reward_keys
    if not keys:
        raise ConfigError("'gdpo' has no rewards", key=_KEYS, expected="keys of the scorer's dict")
    weights = config.gdpo_reward_weights or (1.0,) * len(keys)
    if len(weights) != len(keys):
        raise ConfigError(
            f"{len(weights)} weights for {len(keys)} rewards", key=_WEIGHTS, expected="one each"
        )
    rewards = torch.stack([_read_reward(key, scored, non_tensor_batch) for key in keys])
    return rewards, torch.tensor(weights, dtype=torch.float64, device=rewards.device)


def _read_reward(
    key: str, scored: GroupScores, non_tensor_batch: Mapping[str, np.ndarray]
) -> torch.Tensor:
    """Return one reward, `[B]` float64, rounded to the precision of the rewards as scores are."""
    given = _find_column(key, non_tensor_batch)
    try:
        numbers = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the reward {key!r} is not a number: {error}", key=_KEYS) from error
    rewards = torch.from_numpy(numbers).to(scored.mask.device, scored.dtype).double()
    num_missing = int((scored.groups.counted & ~rewards.isfinite()).sum())
    if num_missing:
        raise ConfigError(
            f"the reward {key!r} is missing, or not a finite number, in {num_missing} rows",
            key=_KEYS,
            expected=f"among the scorer's keys: {', '.join(_known_keys(non_tensor_batch))}",
        )
    return rewards


def _find_column(key: str, non_tensor_batch: Mapping[str, np.ndarray]) -> Sequence[Any]:
    """Return a number or None for each row. The scorer's dicts go before columns."""
    extras = non_tensor_batch.get("reward_extra_info", np.array([]))
    if any(key in (extra or {}) for extra in extras):
        return [(extra or {}).get(key) for extra in extras]
    if key in non_tensor_batch:
        return list(non_tensor_batch[key])
    raise ConfigError(
        f"no row has the reward {key!r}",
        key=_KEYS,
        expected=f"among the scorer's keys: {', '.join(_known_keys(non_tensor_batch))}",
    )


def _known_keys(non_tensor_batch: Mapping[str, np.ndarray]) -> list[str]:
    extras = non_tensor_batch.get("reward_extra_info", np.array([]))
    return sorted({key for extra in extras for key in (extra or {})})
