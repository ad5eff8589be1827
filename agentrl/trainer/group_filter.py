"""Which groups of a step have something to learn from (`algorithm.filter_groups`).

A group whose members are all alike trains on nothing in a group-relative estimator, whatever it
cost. Dynamic sampling drops it and samples others in its place.

Source: Yu et al. 2025 (arXiv 2503.14476), section 3.2, equation 11.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from agentrl.config.schema import FilterGroupsConfig, RewardConfig
from agentrl.errors import ConfigError
from agentrl.rewards.combination import combine_rewards
from agentrl.rewards.scoring import check_number
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.workers.distributed import World

COMBINED = frozenset({"score", "reward", "seq_reward", "seq_final_reward"})
"""Metrics that are the combined reward: what the estimator compares."""


class Measured(NamedTuple):
    """One member of a group, as far as its signal goes; what ranks send each other."""

    place: int
    """Of its prompt, among those of the step."""
    value: float


def find_signal(
    requests: Sequence[AsyncRolloutRequest],
    config: FilterGroupsConfig,
    reward: RewardConfig,
    world: World,
) -> list[int]:
    """Find the groups whose members differ, over all ranks. A collective.

    Members that are not in their group's baseline (the infrastructure failed) count for nothing:
    a group is judged by the rest, and one of which fewer than two are left has no signal.

    Args:
        requests: This rank's, scored.
        config: What must differ.
        reward: How rewards of several sources become one.
        world: The ranks.

    Returns:
        The places of those groups' prompts, in order.

    Raises:
        ConfigError: where the scorer's dict has no such key, or no number under it.
    """
    mine: list[Measured] = []
    with world.agreeing():
        counted = (request for request in requests if request.in_baseline)
        mine += (Measured(r.batch_data_id, measure(r, config.metric, reward)) for r in counted)
    return places_that_differ(world.gather_flat(mine))


def places_that_differ(measured: Iterable[Measured]) -> list[int]:
    """Find the groups whose largest value is not their smallest, in order."""
    groups: dict[int, list[float]] = defaultdict(list)
    for place, value in measured:
        groups[place].append(value)
    return sorted(place for place, values in groups.items() if max(values) != min(values))


def measure(request: AsyncRolloutRequest, metric: str, reward: RewardConfig) -> float:
    """Read what of a request is compared, as float32 holds it: what batches hold rewards in.

    Raises:
        ConfigError: where the scorer's dict has no such key, or no number under it.
    """
    if metric in COMBINED:
        return float(np.float32(combine_rewards(request, reward).total))
    found = request.reward_extra_info
    if metric not in found:
        raise ConfigError(
            f"the scorer said nothing of {metric!r} for {request.request_id}",
            key="algorithm.filter_groups.metric",
            expected=f"one of {', '.join(sorted(COMBINED))} or of the keys of the scorer's dict: "
            f"{', '.join(map(str, found)) or 'it has none'}",
        )
    return float(np.float32(check_number(found[metric], f"the scorer's {metric!r}")))
