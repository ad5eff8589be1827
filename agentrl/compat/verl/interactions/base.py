"""`verl.interactions.base`: the base class of interactions."""

from typing import Any

from agentrl.interactions.base import BaseInteraction as OwnBaseInteraction
from agentrl.interactions.base import InteractionResult


class BaseInteraction(OwnBaseInteraction):
    """An interaction; if `generate_response` is not overridden it replies as verl's does."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult | tuple[bool, str, float, dict[str, Any]]:
        """Reply with verl's default, which ends nothing."""
        return False, "Your current result seems acceptable.", 0.8, {}
