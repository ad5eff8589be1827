"""Figures of the scoring: each reward function by itself, and how long scores took.

reward/<name>/mean      what a function of `reward.functions` gave, unweighted (max, min)
reward/seconds/mean     seconds of one score (p95, max)
scorer/<key>/mean       numbers that the scorer returned under its own keys (max, min)
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, SupportsFloat

from agentrl.config.schema import RewardConfig
from agentrl.rewards import Source
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.figures import Figures, spread, tail

MAX_SCORER_KEYS = 50
"""Keys of a scorer's dict that become metrics, in the order of the alphabet: a scorer that makes up
a key for each problem must not fill the log with columns."""
_OURS = frozenset(source.value for source in Source)


def reward_figures(requests: Sequence[AsyncRolloutRequest], config: RewardConfig) -> Figures:
    """Describe one rank's scores.

    As with `rollout/reward`, requests that are not in their group's baseline are left out.
    `reward/seconds` is of one score, from its call to its answer, be it while others still rolled
    out; `timing_s/reward` is what was waited for after the rollout.
    """
    scored = [r for r in requests if r.in_baseline and r.reward is not None]
    seconds = [
        request.metrics["seconds_reward"]
        for request in requests
        if "seconds_reward" in request.metrics
    ]
    figures = tail("reward/seconds", seconds)
    for function in config.functions:
        given = [float(request.reward_extra_info[function.name]) for request in scored]
        figures |= spread(f"reward/{function.name}", given)
    by_key: dict[str, list[float]] = defaultdict(list)
    for request in scored:
        for key, number in scorer_numbers(request, config).items():
            by_key[key].append(number)
    for key in sorted(by_key)[:MAX_SCORER_KEYS]:
        figures |= spread(f"scorer/{key}", by_key[key])
    return figures


def scorer_numbers(request: AsyncRolloutRequest, config: RewardConfig) -> dict[str, float]:
    """Read the finite numbers that the scorer returned under keys of its own.

    Left out are numbers with a name already: those of `reward.functions`, bonuses and penalties.
    """
    named = {function.name for function in config.functions}
    said = scorer_dict(request)
    read = {str(key): read_number(value) for key, value in said.items() if key not in named}
    return {key: number for key, number in read.items() if number is not None}


def scorer_dict(request: AsyncRolloutRequest) -> dict[str, Any]:
    """Read what the scorer returned besides its number; empty if it returned a bare number.

    A bare number is recorded as `acc` too, which says nothing that the reward does not say.
    """
    said = {k: v for k, v in request.reward_extra_info.items() if k not in _OURS}
    return {} if said == {"acc": request.reward} else said


def read_number(value: object) -> float | None:
    """Read a boolean or a finite number of any library; None for a text or anything else."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if math.isfinite(number) else None
