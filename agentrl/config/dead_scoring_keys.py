"""Keys of the scoring that change nothing in this configuration (no key is ignored silently)."""

from agentrl.config.key_notes import DeadKeyRule
from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.sandbox import UNREAD_BY_FUSION

_BUNDLED_PATHS = "agentrl.rewards."


def may_use(config: RunConfig, *names: str) -> bool:
    """Whether a row may be scored by one of these bundled scorers."""
    reward = config.reward
    custom = reward.custom_reward_function
    paths = [function.path for function in reward.functions] + [custom.path if custom else None]
    if any(path is not None and path.startswith(_BUNDLED_PATHS) for path in paths):
        return True  # which of them it is, is known where they are
    if not reward.functions:
        return custom is None
    bundled = {function.name for function in reward.functions if function.path is None}
    return not bundled.isdisjoint((*names, "data_source"))


SCORING_RULES: tuple[DeadKeyRule, ...] = (
    DeadKeyRule(
        ("reward.sandbox.*",),
        lambda c: not may_use(c, "code"),
        "no bundled scorer runs code in this run",
    ),
    DeadKeyRule(
        ("reward.sandbox.trusted",),
        lambda c: c.reward.sandbox.provider != "subprocess",
        "reward.sandbox.provider is not subprocess, which alone asks",
    ),
    DeadKeyRule(
        tuple(f"reward.sandbox.{name}" for name in UNREAD_BY_FUSION),
        lambda c: c.reward.sandbox.provider == "sandbox_fusion",
        "reward.sandbox.provider is sandbox_fusion, whose service has limits of its own",
    ),
    DeadKeyRule(
        ("reward.num_workers",),
        lambda c: c.reward.manager in ("naive", "dapo", "batch") and not may_use(c, "math"),
        "no scorer runs in a process (reward.manager is not prime)",
    ),
    DeadKeyRule(
        ("reward.max_concurrent_scores",),
        lambda c: c.reward.manager == "batch" and not c.reward.launch_reward_fn_async,
        "reward.manager is batch, and without launch_reward_fn_async it makes one call",
    ),
)
"""Every rule; the first that covers a key gives its reason."""
