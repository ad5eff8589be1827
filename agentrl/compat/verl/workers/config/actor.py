"""`verl.workers.config.actor`: agentrl's settings of the update."""

from pydantic import ConfigDict

from agentrl.config.schema.training import ActorConfig as OwnActorConfig


class ActorConfig(OwnActorConfig):
    """Settings for a policy loss that is called directly."""

    model_config = ConfigDict(extra="ignore")
