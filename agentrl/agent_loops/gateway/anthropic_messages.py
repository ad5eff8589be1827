"""Anthropic's messages: `POST /v1/messages`."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from agentrl.agent_loops.gateway.calls import (
    CallError,
    ChatCall,
    ChatReply,
    SentCall,
    SentMessage,
    write_json,
)
from agentrl.agent_loops.gateway.dialect import (
    Body,
    Event,
    Part,
    cut_text,
    find_ignored,
    narrow_tools,
    read_body,
    read_content,
    read_sampling,
    read_tools,
)


class _Block(Part):
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict[str, Any])
    tool_use_id: str = ""
    content: str | list[Part] | None = None
    is_error: bool = False


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block] = ""


class _Choice(Body):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Request(Body):
    messages: list[_Message] = Field(min_length=1)
    model: str = ""
    max_tokens: int | None = Field(default=None, ge=1)
    system: str | list[Part] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


_HARMLESS = frozenset({"metadata", "service_tier", "cache_control", "betas"})
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessages:
    """Translates messages."""

    name = "anthropic_messages"

    def read(self, body: bytes) -> ChatCall:
        """Read a body (see `Dialect.read`)."""
        given = read_body(_Request, body)
        if given.messages[-1].role == "assistant":
            raise CallError(
                "messages: the last one is the assistant's; the policy's words cannot be given: "
                "expected a user message or tool results at the end",
                code="unsupported_prefill",
                param="messages",
            )
        messages = [SentMessage(role="system", text=read_content(given.system, "system")[0])]
        for index, message in enumerate(given.messages):
            messages += _read_message(message, f"messages[{index}]")
        tools = {f"tools[{i}]": _read_tool(tool) for i, tool in enumerate(given.tools)}
        choice, stops = given.tool_choice or _Choice(type="auto"), given.stop_sequences or []
        names = {"any": "required", "tool": f"tool:{choice.name}"}
        functions, wanted = read_tools(tools), names.get(choice.type, choice.type)
        if wanted == "allowed_tools":
            functions, wanted = narrow_tools(functions, choice)
        left_out = {"tools": None in tools.values(), "stop_sequences": "" in stops}
        return ChatCall(
            messages=messages if messages[0].text else messages[1:],
            tools=functions,
            model=given.model,
            tool_choice=wanted,
            parallel_calls=not choice.disable_parallel_tool_use,
            stop=tuple(filter(None, stops)),
            max_tokens=given.max_tokens,
            stream=bool(given.stream),
            sampling=read_sampling(given),
            ignored=find_ignored(given, _HARMLESS, left_out),
        )

    def write(self, reply: ChatReply, call: ChatCall) -> dict[str, Any]:
        """Write a reply as a `Message`."""
        return {
            **_write_head(reply, call),
            "content": list(_write_blocks(reply.message)),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop_sequence,
            "usage": _write_usage(reply),
        }

    def stream(self, reply: ChatReply, call: ChatCall) -> Iterator[Event]:
        """Write a reply as events of a message stream."""

        def event(name: str, **fields: Any) -> Event:
            return Event({"type": name, **fields}, name)

        opened = {**_write_head(reply, call), "content": [], "stop_reason": None}
        usage = _write_usage(reply) | {"output_tokens": 0}
        yield event("message_start", message=opened | {"stop_sequence": None, "usage": usage})
        for index, block in enumerate(_write_blocks(reply.message)):
            yield event("content_block_start", index=index, content_block=_empty(block))
            for delta in _deltas(block):
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        end = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_sequence}
        yield event("message_delta", delta=end, usage={"output_tokens": reply.completion_tokens})
        yield event("message_stop")

    def write_error(self, error: CallError) -> dict[str, Any]:
        """Write an error as Anthropic's servers do."""
        kind = _ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def _read_message(message: _Message, param: str) -> Iterator[SentMessage]:
    """Yield the messages of a message: results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield SentMessage(role=message.role, text=message.content)
        return
    if message.role == "assistant":
        yield _read_assistant(message.content, param)
        return
    texts: list[Part] = []
    for index, block in enumerate(message.content):
        if block.type != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield SentMessage(role=message.role, text=read_content(texts, f"{param}.content")[0])
            texts = []
        text, _ = read_content(block.content, f"{param}.content[{index}].content")
        if block.is_error:
            text = f"Error: {text}"
        yield SentMessage(role="tool", text=text, call_id=block.tool_use_id)
    if texts or not message.content:
        yield SentMessage(role=message.role, text=read_content(texts, f"{param}.content")[0])


def _read_assistant(blocks: Sequence[_Block], param: str) -> SentMessage:
    own = [block for block in blocks if block.type not in ("redacted_thinking",)]
    texts = [block for block in own if block.type not in ("thinking", "tool_use")]
    text, _ = read_content(texts, f"{param}.content")
    return SentMessage(
        role="assistant",
        text=text,
        form="text" if text else "null",
        thought="\n".join(block.thinking for block in own if block.type == "thinking"),
        calls=tuple(
            SentCall(block.id, block.name, block.input, write_json(block.input))
            for block in own
            if block.type == "tool_use"
        ),
    )


def _read_tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return the function of a tool; None for a tool that Anthropic defines, such as its search."""
    if tool.get("type") not in (None, "custom"):
        return None
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"name": tool.get("name"), "parameters": tool.get("input_schema"), **described}


def _stop_reason(reply: ChatReply) -> str:
    is_stopped = reply.stop_sequence is not None and not reply.message.calls
    return "stop_sequence" if is_stopped else _ENDS[reply.outcome]


def _write_head(reply: ChatReply, call: ChatCall) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
    }


def _write_blocks(message: SentMessage) -> Iterator[dict[str, Any]]:
    if message.thought:
        yield {"type": "thinking", "thinking": message.thought, "signature": "agentrl"}
    if message.text:
        yield {"type": "text", "text": message.text, "citations": None}
    for call in message.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _empty(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block as it is before its deltas."""
    cleared = {"thinking": "", "signature": "", "text": "", "input": {}}
    return block | {key: value for key, value in cleared.items() if key in block}


def _deltas(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "thinking":
        for piece in cut_text(block["thinking"]):
            yield {"type": "thinking_delta", "thinking": piece}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "text":
        for piece in cut_text(block["text"]):
            yield {"type": "text_delta", "text": piece}
    else:
        for piece in cut_text(write_json(block["input"])):
            yield {"type": "input_json_delta", "partial_json": piece}


def _write_usage(reply: ChatReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "output_tokens": reply.completion_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
    }
