"""Figures of the scoring: each reward function by itself, and how long scores took."""

from collections.abc import Sequence

from agentrl.config.schema import RewardConfig
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.figures import Figures, spread, tail


def reward_figures(requests: Sequence[AsyncRolloutRequest], config: RewardConfig) -> Figures:
    """Describe one rank's scores.

    `reward/<name>/mean` (`max`, `min`) is what the function of `reward.functions` gave, unweighted;
    as with `rollout/reward`, requests that are not in their group's baseline are left out.
    `reward/seconds/mean` (`p95`, `max`) is of one score, from its call to its answer, be it while
    others still rolled out; `timing_s/reward` is what was waited for behind the rollout.
    """
    scored = [r.reward_extra_info for r in requests if r.in_baseline and r.reward is not None]
    seconds = [
        request.metrics["seconds_reward"]
        for request in requests
        if "seconds_reward" in request.metrics
    ]
    figures = tail("reward/seconds", seconds)
    for function in config.functions:
        figures |= spread(f"reward/{function.name}", [float(s[function.name]) for s in scored])
    return figures
