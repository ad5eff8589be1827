"""Interactions of verl 0.6.1, with verl's texts."""

import uuid
from typing import Any

from agentrl.compat.scoring import score_gsm8k
from agentrl.interactions.base import BaseInteraction as OwnBaseInteraction
from agentrl.interactions.base import InteractionResult
from agentrl.interactions.session import last_answer
from agentrl.plugins import load_class
from agentrl.plugins.from_verl import VERL_INTERACTIONS, translate

_RIGHT = "Your response is correct!"
_WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class BaseInteraction(OwnBaseInteraction):
    """An interaction that replies as verl's does if `generate_response` is not overridden."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult | tuple[bool, str, float, dict[str, Any]]:
        """Return verl's default reply, which does not end the conversation."""
        return False, "Your current result seems acceptable.", 0.8, {}


class Gsm8kInteraction(BaseInteraction):
    """A user that rejects answers until one is right. Subclasses may override `calculate_score`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        """Store the right answer of one request."""
        instance_id = instance_id or str(uuid.uuid4())
        state = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        self._instance_dict[instance_id] = state
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult | tuple[bool, str, float, dict[str, Any]]:
        """Score the last answer; a right one ends the conversation."""
        self._instance_dict[instance_id]["response"] = last_answer(messages)
        score = await self.calculate_score(instance_id)
        is_right = score == 1.0
        return is_right, _RIGHT if is_right else _WRONG, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Score the last answer, which must end with `#### ` and the number."""
        state = self._instance_dict[instance_id]
        return score_gsm8k(state["response"], state["ground_truth"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Delete the state of the request."""
        del self._instance_dict[instance_id]


class WeatherInteraction(BaseInteraction):
    """A user that sends one reply, which depends on whether a tool was called."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult:
        """End the conversation; the score is 1 if a tool answered."""
        if any(message["role"] == "tool" for message in messages):
            return InteractionResult(True, "Thank you for your weather query!", 1.0)
        text = "Please use the weather tool to get the weather information."
        return InteractionResult(True, text, 0.0)


def get_interaction_class(cls_name: str) -> type[OwnBaseInteraction]:
    """Load an interaction's class by its path.

    Raises:
        PluginError: for a path that does not lead to an interaction.
    """
    path = translate(cls_name, VERL_INTERACTIONS, base="BaseInteraction")
    return load_class(path, OwnBaseInteraction)
