"""Replace a long history by a summary that the policy writes (`rollout.multi_turn.compaction`).

    prompt, call, result, call, result + instruction, summary      set aside as a branch
    prompt + summary, call, result, ...                             the next sequence

The instruction follows the observation that passed the trigger. The summary is a sampled turn, so
it is trained with the rest of its sequence. The next sequence starts with the messages of the first
prompt; the summary is added to the last user message among them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentrl.answers import without_thought
from agentrl.config.schema.run import CompactionConfig
from agentrl.messages import ContentPart, Message
from agentrl.rollout.request import AsyncRolloutRequest

NO_SPACE = "compaction/no_space_for_"
"""Beginning of the names of the metrics that `count_no_space` counts."""


def continue_from_summary(
    opening: Sequence[Message],
    history: Sequence[Message],
    summary: str,
    settings: CompactionConfig,
) -> list[Message]:
    """Return the messages with which the next sequence begins.

    Args:
        opening: The messages of the first prompt.
        history: The later messages, without the instruction and the summary.
        summary: What the policy wrote; a thought before it is left out.
        settings: The heading of the summary, and the number of turns to keep.
    """
    text = f"{settings.heading}\n{without_thought(summary).strip()}"
    messages = list(opening)
    index = max((i for i, one in enumerate(messages) if one.role == "user"), default=None)
    if index is None:
        messages.append(Message(role="user", content=text))
    else:
        messages[index] = _add_text(messages[index], text)
    return [*messages, *last_turns(history, settings.keep_turns)]


def last_turns(history: Sequence[Message], num_turns: int) -> list[Message]:
    """Return the last completions with the messages that answer them."""
    starts = [index for index, one in enumerate(history) if one.role == "assistant"]
    return list(history[starts[-num_turns:][0] :]) if num_turns and starts else []


def media_of(
    messages: Sequence[Message], opening: Sequence[Message], media: Mapping[str, Sequence[Any]]
) -> dict[str, list[Any]]:
    """Return the images and videos of the messages that continue a conversation.

    Args:
        messages: The opening, then the last messages of the conversation.
        opening: The messages of the first prompt.
        media: All images and videos of the conversation, by kind.
    """
    later = messages[len(opening) :]
    found: dict[str, list[Any]] = {}
    for kind, values in media.items():
        first, last = (sum(one.part_types.count(kind) for one in some) for some in (opening, later))
        found[kind] = [*values[:first], *values[len(values) - last :]]
    return {kind: values for kind, values in found.items() if values}


def count_no_space(
    request: AsyncRolloutRequest, part: Literal["instruction", "summary", "prompt"]
) -> None:
    """Count a compaction that was due and did not happen, because a part of it does not fit."""
    name = f"{NO_SPACE}{part}"
    request.metrics[name] = request.metrics.get(name, 0.0) + 1


def _add_text(message: Message, text: str) -> Message:
    if isinstance(message.content, list):
        content = [*message.content, ContentPart(type="text", text=f"\n\n{text}")]
        return message.model_copy(update={"content": content})
    return message.model_copy(update={"content": f"{message.content or ''}\n\n{text}"})
