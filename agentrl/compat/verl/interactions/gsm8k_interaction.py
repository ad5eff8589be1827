"""`verl.interactions.gsm8k_interaction`: agentrl's interaction, with verl's texts and settings."""

from typing import Any

from agentrl.interactions.gsm8k_interaction import Gsm8kInteraction as OwnGsm8kInteraction


class Gsm8kInteraction(OwnGsm8kInteraction):
    """Say whether an answer is right, in verl's words, until it is."""

    right_text = "Your response is correct!"
    wrong_text = "Your response is incorrect! You need to reflect on your answer and try again."

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__({"method": "strict", "max_hints": None, **config})
