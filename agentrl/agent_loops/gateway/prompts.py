"""Encode the history of a call as a prompt, without delay for the calls of other agents."""

from collections.abc import Sequence
from functools import partial

from agentrl.agent_loops.gateway.calls import CallError, write_json
from agentrl.agent_loops.gateway.limits import AgentThread
from agentrl.errors import TemplateError
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.states import StopReason
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.templates.slots import TextOrigin

_MAX_INLINE_CHARACTERS = 20_000
"""A prompt with more is rendered on a thread."""
_MAX_INLINE_PARTS = 64
"""As `_MAX_INLINE_CHARACTERS`, for messages, calls and tools together."""


class TooLongError(CallError):
    """A history that leaves no token for a completion, in the words that agents know from servers.

    Args:
        num_tokens: Its tokens; if it was not encoded, fewer than it has.
        limit: The limit that they exceed.
        budget: Name of the limit.
    """

    def __init__(self, num_tokens: int, limit: int, budget: StopReason) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {num_tokens} tokens. prompt is too long: {num_tokens} tokens > {limit} "
            f"maximum (budget: {budget})",
            code="context_length_exceeded",
            param="messages",
        )
        self.budget = budget


async def encode_prompt(
    messages: Sequence[Message],
    tools: Sequence[OpenAIFunctionToolSchema],
    template: ChatTemplate,
    max_model_len: int,
    thread: AgentThread | None = None,
) -> list[int]:
    """Encode a history and the generation prompt. The texts of assistants are outside texts.

    A large history is rendered on a thread. It is not encoded if it exceeds `max_model_len` with
    tokens of any length.

    Args:
        messages: The history.
        tools: What the template shows of tools.
        template: Renders and encodes.
        max_model_len: Most tokens.
        thread: Where a large history is rendered; None: on any thread.

    Raises:
        CallError: If the template cannot render the messages, or they are too long to encode.
    """
    # An assistant's message in a prompt was written by the client, or is a copy of one.
    plan = partial(template.plan_prompt, messages, tools, assistant=TextOrigin.OUTSIDE)
    try:
        if _is_large(messages, tools):
            planned = await (thread or AgentThread()).run(plan)
        else:
            planned = plan()
    except TemplateError as error:
        raise CallError(
            f"the chat template cannot render these messages: {error}",
            code="invalid_messages",
            param="messages",
        ) from None
    fewest = sum(map(len, planned.texts)) // template.longest_token
    if fewest >= max_model_len:
        raise TooLongError(fewest, max_model_len, StopReason.MODEL_LENGTH)
    return (await template.encode_planned(planned)).ids


def _is_large(messages: Sequence[Message], tools: Sequence[OpenAIFunctionToolSchema]) -> bool:
    """Whether the messages take so long to render that other requests would wait."""
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    if len(messages) + len(calls) + len(tools) > _MAX_INLINE_PARTS:
        return True
    num_written = sum(len(write_json(call.arguments)) for call in calls)
    return num_written + sum(len(message.text) for message in messages) > _MAX_INLINE_CHARACTERS
