"""Simulated users and environments that answer the policy: the base class and its loader.

Importing this package loads neither torch nor transformers.
"""

from agentrl.interactions.base import BaseInteraction, InteractionResult
from agentrl.interactions.registry import initialize_interactions_from_config

__all__ = ["BaseInteraction", "InteractionResult", "initialize_interactions_from_config"]
