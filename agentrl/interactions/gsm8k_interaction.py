"""A user with a GSM8K problem, who knows when the answer is wrong."""

import math
import uuid
from dataclasses import dataclass
from typing import Any

from agentrl.answers import extract_gsm8k_answer, same_number
from agentrl.interactions.base import BaseInteraction, InteractionResult
from agentrl.messages import Message

_RIGHT = "Your answer is correct."
_WRONG = (
    "Your answer is not correct. Check your reasoning and answer again; write the number behind "
    "#### on the last line."
)


@dataclass(slots=True)
class _Talk:
    ground_truth: str
    num_hints: int = 0


class Gsm8kInteraction(BaseInteraction):
    """Say that an answer is wrong and ask again, at most `max_hints` times, then end.

    Scores 1.0 for a right answer and 0.0 for a wrong one.

    Args:
        config: `max_hints` (default 2; null: as often as the run allows); `method`, `strict` or
            `flexible` (the default): how an answer is read.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        hints = config.get("max_hints", 2)
        self._max_hints = math.inf if hints is None else int(hints)
        self._method = config.get("method", "flexible")
        if self._method not in ("strict", "flexible"):
            raise ValueError(f"method is {self._method!r}; expected strict or flexible")
        self._talks: dict[str, _Talk] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: Any = "", **kwargs: Any
    ) -> str:
        """Note the right answer of one request."""
        instance_id = instance_id or uuid.uuid4().hex
        self._talks[instance_id] = _Talk(str(ground_truth))
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult:
        """Judge the last answer."""
        talk = self._talks[instance_id]
        answer = extract_gsm8k_answer(_last_answer(messages), self._method)
        if answer is not None and same_number(answer, talk.ground_truth):
            return InteractionResult(True, _RIGHT, 1.0, {"num_hints": talk.num_hints})
        if talk.num_hints >= self._max_hints:
            return InteractionResult(True, "", 0.0, {"num_hints": talk.num_hints})
        talk.num_hints += 1
        return InteractionResult(False, _WRONG, 0.0, {"num_hints": talk.num_hints})

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the request."""
        self._talks.pop(instance_id, None)


def _last_answer(messages: list[dict[str, Any]]) -> str:
    """Return the text of the policy's last message."""
    for message in reversed(messages):
        if message["role"] == "assistant":
            return Message.model_validate(message).text
    return ""
