"""`verl.interactions.utils.interaction_registry`: from a YAML to interactions."""

from agentrl.interactions.base import BaseInteraction
from agentrl.interactions.registry import STAND_INS, initialize_interactions_from_config
from agentrl.plugins import load_class
from agentrl.plugins.from_verl import translate

__all__ = ["get_interaction_class", "initialize_interactions_from_config"]


def get_interaction_class(cls_name: str) -> type[BaseInteraction]:
    """Load an interaction's class by its path.

    Raises:
        PluginError: for a path that does not lead to an interaction.
    """
    path = translate(cls_name, STAND_INS, base="BaseInteraction")
    return load_class(path, BaseInteraction)
