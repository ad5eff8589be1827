"""What every dialect of the gateway is translated to: a call, its reply, and its error.

    body of a client -> ChatCall -> trajectory -> ChatReply -> body or events for the client

Messages are kept as the client sent them, so that the differences from what was sampled can be
counted. `SentMessage.to_message` returns what the chat template gets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.engines.protocol import FinishReason
from agentrl.errors import AgentRLError
from agentrl.messages import FunctionCall, Message, OpenAIFunctionToolSchema, ToolCall, dump_json


class CallError(AgentRLError):
    """A call that gets an error as its answer; each dialect writes it in its own format.

    Args:
        message: What is wrong, what was expected, how to fix it.
        status: HTTP status.
        code: Short name of the problem, such as `context_length_exceeded`.
        param: The field of the body that is wrong.
    """

    def __init__(self, message: str, *, status: int = 400, code: str, param: str | None = None):
        super().__init__(message, status=status, code=code)
        self.message, self.status, self.code, self.param = message, status, code, param

    @property
    def can_be_repeated(self) -> bool:
        """Whether the same call may succeed later. Clients repeat it if so."""
        return self.status == 429 or self.status >= 500


@dataclass(frozen=True, slots=True)
class SentCall:
    """A tool call in a history."""

    id: str
    name: str
    arguments: dict[str, Any]
    text: str
    """The arguments as JSON, as they were sent."""

    @classmethod
    def of(cls, call: ToolCall) -> "SentCall":
        """Make the record of a call that the policy sampled."""
        arguments = call.function.arguments
        return cls(call.id, call.function.name, arguments, write_json(arguments))


Form = Literal["text", "parts", "null"]
"""How a content was sent: as one text, as parts, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMessage:
    """A message of a history, as the client sent it, or as the gateway sent it to the client."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    form: Form = "text"
    thought: str = ""
    """Thinking (reasoning) apart from the text; empty if there is none."""
    calls: tuple[SentCall, ...] = ()
    call_id: str = ""
    """Id of the call that a tool message answers."""
    name: str = ""
    """Name of the tool that a tool message is from."""
    is_instructions: bool = False
    """Whether it is the `instructions` of a call. A call that follows an earlier reply brings its
    own."""

    def to_message(self) -> Message:
        """Return the message that the chat template gets."""
        calls = [
            ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in self.calls
        ]
        fields: dict[str, Any] = {}
        if self.thought:
            fields["reasoning_content"] = self.thought
        return Message(
            role=self.role,
            content=self.text,
            tool_calls=calls or None,
            tool_call_id=self.call_id or None,
            name=self.name or None,
            **fields,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A request for one completion."""

    messages: Sequence[SentMessage]
    is_large: bool = False
    """Whether its history is matched and its answer written on a thread."""
    previous_reply: str = ""
    """`reply_id` of the reply that `messages` follow, if they are not the whole history."""
    tools: Sequence[OpenAIFunctionToolSchema] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict[str, str])
    """By the name of a tool, the client's namespace that its name begins with."""
    model: str = ""
    """Name of the model that the client asked for. It is echoed and has no effect."""
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or `tool:` and the name of the only tool to call. Any other
    choice has no effect, and is reported."""
    parallel_calls: bool = True
    """Whether the client accepts several calls in one completion."""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = True
    """Whether a stream ends with the usage, in dialects in which this is an option."""
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    """Sampling parameters of the client (`temperature`, `top_p`, `top_k`). The rollout's own
    parameters rule; a differing value is reported."""
    ignored: tuple[str, ...] = ()
    """Further fields that were sent and have no effect."""
    echo: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields that the dialect repeats in its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A completion, as a client gets it."""

    reply_id: str
    """Unique in the process."""
    message: SentMessage
    finish_reason: FinishReason
    stop_sequence: str | None = None
    """The client's stop sequence that ended the completion."""
    token_texts: Sequence[str] = ()
    """Text of each sampled token; only if the client asked for log-probabilities."""
    log_probs: Sequence[float] = ()
    prompt_tokens: int
    completion_tokens: int
    thought_tokens: int = 0
    """Tokens of the completion up to the end of its thought."""
    cached_tokens: int
    created: int
    """Unix time of the completion."""
    unmet: tuple[str, ...] = ()
    """Fields of the call that had no effect, for the header `x-agentrl-ignored`."""

    @property
    def outcome(self) -> Literal["stop", "length", "tool_calls"]:
        """Why the completion ended, as OpenAI names it."""
        if self.finish_reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.calls else "stop"


def write_json(value: Any) -> str:
    """Write a value as JSON, in the form of all arguments that the gateway sends."""
    return dump_json(value)
