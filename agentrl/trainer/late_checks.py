"""Check what can only be known with torch loaded: registered methods, and the engine."""

from agentrl.algorithms import get_adv_estimator_fn, get_policy_loss_fn
from agentrl.config import Purpose, RunConfig
from agentrl.errors import MissingExtraError
from agentrl.rewards import get_reward_manager
from agentrl.rollout.tool_parsers import get_tool_parser
from agentrl.trainer.engine_choice import check_engine


def check_late(
    config: RunConfig, *, purpose: Purpose = Purpose.TRAIN, starts_here: bool = True
) -> list[str]:
    """Refuse a run with an unknown method, or an engine that cannot start.

    Args:
        config: Of the run.
        purpose: What is to be done with the run.
        starts_here: Whether it runs on this machine; if not, what is not installed here is a note.

    Returns:
        What its user should know.

    Raises:
        ConfigError: for an unknown name, or an argument that the engine does not know.
        MissingExtraError: for an engine that is not installed.
    """
    check_names(config)
    if purpose is Purpose.SFT:
        return []
    try:
        check_engine(config)
    except MissingExtraError as missing:
        if starts_here:
            raise
        return [f"on this machine, {missing}"]
    return []


def check_names(config: RunConfig) -> None:
    """Look up what the run file chooses by name, so that a slip is not found at the first step.

    Raises:
        ConfigError: with the nearest name that there is.
    """
    get_adv_estimator_fn(config.algorithm.adv_estimator)
    get_policy_loss_fn(config.actor.policy_loss.loss_mode)
    get_reward_manager(config.reward.manager)
    if config.rollout.multi_turn.format is not None:
        get_tool_parser(config.rollout.multi_turn.format)
