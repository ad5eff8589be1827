"""`verl.interactions.weather_interaction`: one reply, which says if a tool was called."""

from typing import Any

from agentrl.compat.verl.interactions.base import BaseInteraction
from agentrl.interactions.base import InteractionResult


class WeatherInteraction(BaseInteraction):
    """Thank for an answer with a tool's result, and ask for one without."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult:
        """End the conversation, scored by whether any tool answered."""
        if any(message["role"] == "tool" for message in messages):
            return InteractionResult(True, "Thank you for your weather query!", 1.0)
        text = "Please use the weather tool to get the weather information."
        return InteractionResult(True, text, 0.0)
