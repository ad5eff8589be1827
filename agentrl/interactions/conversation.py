"""What an interaction reads of the conversation that it is shown."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.messages import Message


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the policy's last message; empty where it said nothing yet."""
    for message in reversed(messages):
        if message["role"] == "assistant":
            return Message.model_validate(message).text
    return ""
