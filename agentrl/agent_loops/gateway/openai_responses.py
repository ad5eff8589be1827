"""OpenAI's responses: `POST /v1/responses`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.agent_loops.gateway.calls import CallError, ChatCall, ChatReply, SentMessage
from agentrl.agent_loops.gateway.dialect import (
    Body,
    Event,
    Part,
    cut_text,
    find_ignored,
    narrow_tools,
    qualify,
    read_arguments,
    read_body,
    read_content,
    read_sampling,
    read_tools,
)
from agentrl.agent_loops.gateway.openai_chat import OpenAIChat, write_log_probs


class _Item(Body):
    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str = ""
    namespace: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] | None = None
    summary: list[Part] | None = None


class _Namespace(Body):
    type: Literal["namespace"]
    name: str = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])


_Tool = Annotated[_Namespace | dict[str, Any], Field(union_mode="left_to_right")]


class _Choice(Body):
    type: str
    namespace: str = ""
    name: str = ""


class _Request(Body):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] = Field(default_factory=list[_Tool])
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    conversation: Any = None


_HARMLESS = frozenset(
    {"user", "store", "metadata", "service_tier", "truncation", "prompt_cache_key", "reasoning"}
    | {"safety_identifier", "stream_options"}
)
_LOG_PROBS = "message.output_text.logprobs"


class OpenAIResponses:
    """Translates responses."""

    name = "openai_responses"

    def read(self, body: bytes) -> ChatCall:
        """Read a body (see `Dialect.read`)."""
        given = read_body(_Request, body)
        if given.conversation is not None:
            raise CallError(
                "conversation: the gateway keeps no conversations; send the whole history in "
                "`input`, or `previous_response_id`",
                code="unsupported_field",
                param="conversation",
            )
        items = given.input
        if isinstance(items, str):
            items = [_Item(role="user", content=items)]
        messages = list(_read_items(items))
        if given.instructions:
            first = SentMessage(role="system", text=given.instructions, is_instructions=True)
            messages.insert(0, first)
        if not messages:
            raise CallError("input: no items", code="invalid_request", param="input")
        tools: dict[str, dict[str, Any] | None] = {}
        namespaces: dict[str, str] = {}
        for index, tool in enumerate(given.tools):
            at = f"tools[{index}]"
            if isinstance(tool, dict):
                tools[at] = _read_tool(tool)
                continue
            inner = [_read_tool(one, tool.name) for one in tool.tools]
            tools |= {f"{at}.tools[{i}]": one for i, one in enumerate(inner)}
            namespaces |= {one["name"]: tool.name for one in inner if one}
        choice = given.tool_choice or "auto"
        wanted = choice if isinstance(choice, str) else choice.type
        if not isinstance(choice, str) and wanted == "function":
            wanted = f"tool:{qualify(choice.namespace, choice.name)}"
        functions = read_tools(tools)
        if not isinstance(choice, str) and wanted == "allowed_tools":
            functions, wanted = narrow_tools(functions, choice)
        return ChatCall(
            messages=messages,
            previous_reply=(given.previous_response_id or "").removeprefix("resp_"),
            tools=functions,
            namespaces=namespaces,
            model=given.model,
            tool_choice=wanted,
            parallel_calls=given.parallel_tool_calls is not False,
            max_tokens=given.max_output_tokens,
            logprobs=_LOG_PROBS in (given.include or []),
            stream=bool(given.stream),
            sampling=read_sampling(given),
            ignored=find_ignored(given, _HARMLESS, {"tools": None in tools.values()}),
            echo={
                "instructions": given.instructions,
                "tools": [t if isinstance(t, dict) else t.model_dump() for t in given.tools],
                "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
                "parallel_tool_calls": given.parallel_tool_calls is not False,
                "max_output_tokens": given.max_output_tokens,
                "temperature": given.temperature,
                "top_p": given.top_p,
                "previous_response_id": given.previous_response_id,
            },
        )

    def write(self, reply: ChatReply, call: ChatCall) -> dict[str, Any]:
        """Write a reply as a `Response`."""
        is_cut = reply.outcome == "length"
        return _write_head(reply, call) | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(_write_items(reply, call)),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": reply.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": reply.thought_tokens},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def stream(self, reply: ChatReply, call: ChatCall) -> Iterator[Event]:
        """Write a reply as events of a response stream."""
        numbers = count()

        def event(name: str, /, **fields: Any) -> Event:
            return Event({"type": name, "sequence_number": next(numbers), **fields}, name)

        opened = _write_head(reply, call)
        yield event("response.created", response=opened)
        yield event("response.in_progress", response=opened)
        for index, item in enumerate(_write_items(reply, call)):
            at = {"output_index": index, "item_id": item["id"]}
            yield event("response.output_item.added", output_index=index, item=_empty(item))
            for name, fields in _parts_of(item):
                yield event(f"response.{name}", **at, **fields)
            yield event("response.output_item.done", output_index=index, item=item)
        done = self.write(reply, call)
        yield event(f"response.{done['status']}", response=done)

    def write_error(self, error: CallError) -> dict[str, Any]:
        """Write an error as OpenAI's servers do."""
        return OpenAIChat().write_error(error)


def _read_items(items: Sequence[_Item]) -> Iterator[SentMessage]:
    """Yield messages. The reasoning, text and calls of one completion become one message."""
    turn: list[SentMessage] = []
    for index, item in enumerate(items):
        param = f"input[{index}]"
        part = _read_assistant(item, param)
        is_next = part and not part.calls and turn and (turn[-1].text or turn[-1].calls)
        if turn and (part is None or is_next):
            yield _join(turn)
            turn = []
        if part is None:
            yield _read_other(item, param)
        else:
            turn.append(part)
    if turn:
        yield _join(turn)


def _join(parts: Sequence[SentMessage]) -> SentMessage:
    """Make one message of the parts of a completion."""
    text = "".join(part.text for part in parts)
    return replace(
        parts[0],
        text=text,
        form="text" if text else "null",
        thought="".join(part.thought for part in parts),
        calls=tuple(call for part in parts for call in part.calls),
    )


def _read_assistant(item: _Item, param: str) -> SentMessage | None:
    """Read a part of a completion; None if the item is of others."""
    if item.type == "reasoning":
        # Without a type of part, the policy's own thought is preferred to its summary.
        parts = item.content if isinstance(item.content, list) else []
        thought = "".join(part.text or "" for part in parts or item.summary or [])
        return SentMessage(role="assistant", form="null", thought=thought)
    if item.type == "function_call":
        name = qualify(item.namespace, item.name)
        call = read_arguments(name, item.call_id, item.arguments, param)
        return SentMessage(role="assistant", form="null", calls=(call,))
    if item.type == "message" and item.role == "assistant":
        text, _ = read_content(item.content, f"{param}.content")
        return SentMessage(role="assistant", text=text, form="text" if text else "null")
    return None


def _read_other(item: _Item, param: str) -> SentMessage:
    if item.type == "function_call_output":
        text, _ = read_content(item.output, f"{param}.output")
        return SentMessage(role="tool", text=text, call_id=item.call_id)
    if item.type != "message" or item.role is None or item.role == "assistant":
        raise CallError(
            f"{param}: an item of the type {item.type!r}; expected message, reasoning, "
            "function_call or function_call_output",
            code="unsupported_item",
            param=param,
        )
    text, _ = read_content(item.content, f"{param}.content")
    return SentMessage(role="system" if item.role == "developer" else item.role, text=text)


def _read_tool(tool: dict[str, Any], space: str = "") -> dict[str, Any] | None:
    """Return the function of a tool; None if it is of another kind, such as a search."""
    if tool.get("type") not in (None, "function"):
        return None
    function = {key: tool.get(key) for key in ("name", "description", "parameters")}
    return function | {"name": function["name"] and qualify(space, function["name"])}


def _write_head(reply: ChatReply, call: ChatCall) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.reply_id}",
        "object": "response",
        "created_at": reply.created,
        "model": call.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "metadata": {},
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        **call.echo,
    }


def _write_items(reply: ChatReply, call: ChatCall) -> Iterator[dict[str, Any]]:
    message, number = reply.message, reply.reply_id
    if message.thought:
        content = [{"type": "reasoning_text", "text": message.thought}]
        yield {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content}
    if message.text or not message.calls:
        part: dict[str, Any] = {"type": "output_text", "text": message.text, "annotations": []}
        part["logprobs"] = write_log_probs(reply)["content"] if call.logprobs else []
        status = "incomplete" if reply.outcome == "length" else "completed"
        yield {
            "type": "message",
            "id": f"msg_{number}",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
    for index, made in enumerate(message.calls):
        space = call.namespaces.get(made.name, "")
        yield {
            "type": "function_call",
            "id": f"fc_{number}_{index}",
            "call_id": made.id,
            "name": made.name.removeprefix(qualify(space, "")),
            **({"namespace": space} if space else {}),
            "arguments": made.text,
            "status": "completed",
        }


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is before its parts."""
    if item["type"] == "reasoning":
        return item | {"content": []}
    cleared = {"content": [], "arguments": ""}
    started = {key: value for key, value in cleared.items() if key in item}
    return item | {"status": "in_progress"} | started


def _parts_of(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of an item between `added` and `done`: their names and fields."""
    if item["type"] == "function_call":
        for piece in cut_text(item["arguments"]):
            yield "function_call_arguments.delta", {"delta": piece}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "function_call_arguments.done", done
        return
    for index, part in enumerate(item["content"]):
        at = {"content_index": index}
        is_text = part["type"] == "output_text"
        name = "output_text" if is_text else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if is_text else {}
        yield "content_part.added", {**at, "part": part | {"text": ""}}
        for piece in cut_text(part["text"]):
            yield f"{name}.delta", {**at, "delta": piece, **more}
        yield f"{name}.done", {**at, "text": part["text"], **more}
        yield "content_part.done", {**at, "part": part}
