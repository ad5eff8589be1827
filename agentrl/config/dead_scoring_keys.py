"""Keys of the scoring that change nothing in this configuration (law 12)."""

from agentrl.config.key_notes import DeadKeyRule
from agentrl.config.schema import RunConfig


def may_use(config: RunConfig, *names: str) -> bool:
    """Whether a row may be scored by one of these bundled scorers."""
    reward = config.reward
    if not reward.functions:
        return reward.custom_reward_function is None
    bundled = {function.name for function in reward.functions if function.path is None}
    return not bundled.isdisjoint((*names, "data_source"))


SCORING_RULES: tuple[DeadKeyRule, ...] = (
    DeadKeyRule(
        ("reward.sandbox.*",),
        lambda c: not may_use(c, "code"),
        "no bundled scorer runs code in this run",
    ),
    DeadKeyRule(
        ("reward.num_workers",),
        lambda c: c.reward.manager in ("naive", "dapo", "batch") and not may_use(c, "math"),
        "no scorer runs in a process (reward.manager is not prime)",
    ),
    DeadKeyRule(
        ("reward.max_concurrent_scores",),
        lambda c: c.reward.manager == "batch",
        "reward.manager is batch, which makes one call at a time",
    ),
)
"""Every rule; the first that covers a key gives its reason."""
