"""`verl.interactions.gsm8k_interaction`: a user with a GSM8K problem, in verl's words."""

import uuid
from typing import Any

from agentrl.compat.verl.interactions.base import BaseInteraction
from agentrl.compat.verl.utils.reward_score import gsm8k
from agentrl.interactions.base import InteractionResult
from agentrl.interactions.session import last_answer

_RIGHT = "Your response is correct!"
_WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Say whether an answer is right until it is. Subclasses may override `calculate_score`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        """Note the right answer of one request."""
        instance_id = instance_id or str(uuid.uuid4())
        self._instance_dict[instance_id] = {
            "response": "",
            "ground_truth": ground_truth,
            "reward": 0.0,
        }
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult | tuple[bool, str, float, dict[str, Any]]:
        """Judge the last answer."""
        self._instance_dict[instance_id]["response"] = last_answer(messages)
        score = await self.calculate_score(instance_id)
        is_right = score == 1.0
        return is_right, _RIGHT if is_right else _WRONG, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Score the last answer, which must end with `#### ` and the number."""
        talk = self._instance_dict[instance_id]
        return gsm8k.compute_score(
            talk["response"], talk["ground_truth"], method="strict", format_score=0.0, score=1.0
        )

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the request."""
        del self._instance_dict[instance_id]
