"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from agentrl.agent_loops.gateway.calls import CallError, ChatCall, ChatReply, SentCall, SentMessage
from agentrl.agent_loops.gateway.dialect import (
    Body,
    Event,
    Part,
    cut_text,
    find_ignored,
    narrow_tools,
    read_arguments,
    read_body,
    read_content,
    read_sampling,
    read_tools,
    refuse_several,
)


class _Function(Body):
    name: str
    arguments: str = "{}"


class _Call(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Named(Body):
    name: str = ""


class _Choice(Body):
    type: str
    function: _Named = _Named()


class _StreamOptions(Body):
    include_usage: bool = False


class _Request(Body):
    messages: list[_Message] = Field(min_length=1)
    model: str = ""
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


_HARMLESS = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier"})


class OpenAIChat:
    """Translates chat completions."""

    name = "openai_chat"

    def read(self, body: bytes) -> ChatCall:
        """Read a body (see `Dialect.read`)."""
        given = read_body(_Request, body)
        refuse_several(given.n)
        tools = {
            f"tools[{i}]": tool.get("function", {})
            if tool.get("type") in (None, "function")
            else None
            for i, tool in enumerate(given.tools)
        }
        functions, choice = read_tools(tools), given.tool_choice or "auto"
        if not isinstance(choice, str) and choice.type == "allowed_tools":
            functions, choice = narrow_tools(functions, choice)
        elif not isinstance(choice, str):
            choice = f"tool:{choice.function.name}" if choice.type == "function" else choice.type
        stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
        left_out = {"tools": None in tools.values(), "stop": "" in stops}
        return ChatCall(
            messages=[_read_message(m, f"messages[{i}]") for i, m in enumerate(given.messages)],
            tools=functions,
            model=given.model,
            tool_choice=choice,
            parallel_calls=given.parallel_tool_calls is not False,
            stop=tuple(filter(None, stops)),
            max_tokens=given.max_completion_tokens or given.max_tokens,
            logprobs=bool(given.logprobs),
            stream=bool(given.stream),
            stream_usage=given.stream_options is not None and given.stream_options.include_usage,
            sampling=read_sampling(given),
            ignored=find_ignored(given, _HARMLESS, left_out),
        )

    def write(self, reply: ChatReply, call: ChatCall) -> dict[str, Any]:
        """Write a reply as a `ChatCompletion`."""
        message = reply.message
        written: dict[str, Any] = {
            "role": "assistant",
            "content": None if message.form == "null" else message.text,
            "refusal": None,
        }
        if message.thought:
            written["reasoning_content"] = message.thought
        if message.calls:
            written["tool_calls"] = [_write_call(made) for made in message.calls]
        return {
            "id": f"chatcmpl-{reply.reply_id}",
            "object": "chat.completion",
            "created": reply.created,
            "model": call.model,
            "choices": [
                {
                    "index": 0,
                    "message": written,
                    "logprobs": write_log_probs(reply) if call.logprobs else None,
                    "finish_reason": reply.outcome,
                }
            ],
            "usage": _write_usage(reply),
        }

    def stream(self, reply: ChatReply, call: ChatCall) -> Iterator[Event]:
        """Write a reply as `ChatCompletionChunk`s."""
        message = reply.message
        head = {
            "id": f"chatcmpl-{reply.reply_id}",
            "object": "chat.completion.chunk",
            "created": reply.created,
            "model": call.model,
        }

        def chunk(delta: dict[str, Any], end: str | None = None, **extra: Any) -> Event:
            return Event(
                {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end, **extra}]}
            )

        yield chunk({"role": "assistant", "content": "" if message.form == "text" else None})
        for piece in cut_text(message.thought):
            yield chunk({"reasoning_content": piece})
        for piece in cut_text(message.text):
            yield chunk({"content": piece})
        for index, made in enumerate(message.calls):
            opened = _write_call(made) | {"index": index}
            opened["function"] = {"name": made.name, "arguments": ""}
            yield chunk({"tool_calls": [opened]})
            for piece in cut_text(made.text):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        extra = {"logprobs": write_log_probs(reply)} if call.logprobs else {}
        yield chunk({}, reply.outcome, **extra)
        if call.stream_usage:
            yield Event({**head, "choices": [], "usage": _write_usage(reply)})
        yield Event("[DONE]")

    def write_error(self, error: CallError) -> dict[str, Any]:
        """Write an error as OpenAI's servers do."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {
            "error": {
                "message": error.message,
                "type": kind,
                "param": error.param,
                "code": error.code,
            }
        }


def _read_message(message: _Message, param: str) -> SentMessage:
    text, form = read_content(message.content, f"{param}.content")
    calls = [
        read_arguments(call.function.name, call.id, call.function.arguments, f"{param}.tool_calls")
        for call in message.tool_calls or []
    ]
    is_assistant = message.role == "assistant"
    return SentMessage(
        role="system" if message.role == "developer" else message.role,
        text=text,
        form=form,
        thought=(message.reasoning_content or message.reasoning or "") if is_assistant else "",
        calls=tuple(calls) if is_assistant else (),
        call_id=message.tool_call_id if message.role == "tool" else "",
        name=message.name if message.role == "tool" else "",
    )


def _write_call(call: SentCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.text}
    return {"id": call.id, "type": "function", "function": function}


def write_log_probs(reply: ChatReply) -> dict[str, Any]:
    """Return the sampled tokens with their log-probabilities, as OpenAI writes them.

    A token that is a part of a character has no bytes.
    """
    pairs = zip(reply.token_texts, reply.log_probs, strict=True)
    content = [
        {
            "token": text,
            "logprob": value,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, value in pairs
    ]
    return {"content": content, "refusal": None}


def _write_usage(reply: ChatReply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reply.thought_tokens},
    }
