"""What an interaction reads of the conversation that it is shown."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.messages import Message

_BEGIN_OF_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the policy's last message; empty where it said nothing yet."""
    for message in reversed(messages):
        if message["role"] == "assistant":
            return Message.model_validate(message).text
    return ""


def without_thought(text: str) -> str:
    """Return what stands behind the last thought: what is said aloud. One that was cut hides all.

    Example:
        >>> without_thought("<think>hm</think> Left.")
        'Left.'
    """
    return text.rpartition(_END_OF_THOUGHT)[2].partition(_BEGIN_OF_THOUGHT)[0].strip()
