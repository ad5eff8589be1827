"""`verl.workers.config`: the settings that loss functions read."""

from agentrl.compat.verl.workers.config.actor import ActorConfig

__all__ = ["ActorConfig"]
