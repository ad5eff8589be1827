"""The interface of a dialect, and what all dialects share: reading bodies, tools and options."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from agentrl.agent_loops.gateway.calls import (
    CallError,
    ChatCall,
    ChatReply,
    Form,
    SentCall,
)
from agentrl.agent_loops.gateway.limits import Budget, Inside, read_json
from agentrl.messages import OpenAIFunctionToolSchema, dump_json
from agentrl.rollout.tool_parsers.json_calls import decode_json

M = TypeVar("M", bound=BaseModel)


class Body(BaseModel):
    """A part of a client's body. A null is an absent field.

    Unknown fields are kept; those of the body itself are reported.
    """

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {k: v for k, v in cast("dict[str, Any]", given).items() if v is not None}


class Event(NamedTuple):
    """One server-sent event."""

    data: Mapping[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        """Return the event as it is sent."""
        text = self.data if isinstance(self.data, str) else dump_json(self.data)
        head = f"event: {self.name}\n" if self.name else ""
        return f"{head}data: {text}\n\n".encode()


class Dialect(Protocol):
    """Translates between one API and the gateway's records."""

    name: str

    def read(self, body: bytes) -> ChatCall:
        """Read a client's body.

        Raises:
            CallError: If it is not valid, or asks for what the gateway cannot do.
        """
        ...

    def write(self, reply: ChatReply, call: ChatCall) -> dict[str, Any]:
        """Write a reply as a body."""
        ...

    def stream(self, reply: ChatReply, call: ChatCall) -> Iterator[Event]:
        """Write a reply as events."""
        ...

    def write_error(self, error: CallError) -> dict[str, Any]:
        """Write an error as a body; in a stream, as the data of an event."""
        ...


def read_body(model: type[M], body: bytes) -> M:
    """Read the body of a call. Halves of surrogate pairs become U+FFFD, and are reported.

    Raises:
        CallError: If it is not JSON, exceeds a limit, or is not the JSON of the model. Names the
            field.
    """
    try:
        return model.model_validate(read_json(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CallError(
            f"{where or 'the body'}: {first['msg']}", code="invalid_request", param=where or None
        ) from None
    except ValueError as error:
        if repaired := _without_surrogates(body):
            read = read_body(model, repaired)
            cast("dict[str, Any]", read.model_extra)["surrogates"] = True
            return read
        raise CallError(f"the body: Invalid JSON: {error}", code="invalid_request") from None


def _without_surrogates(body: bytes) -> bytes | None:
    """Replace halves of surrogate pairs in JSON by U+FFFD; None if there are none."""
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    replaced = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return replaced.encode() if replaced != text else None


def refuse_several(n: int | None) -> None:
    """Refuse a call for several completions.

    Raises:
        CallError: If `n` is not 1.
    """
    if n not in (None, 1):
        raise CallError(
            f"n is {n}; the gateway samples one completion per call: expected n = 1, and one call "
            "for each completion",
            code="unsupported_value",
            param="n",
        )


def read_tools(functions: Mapping[str, Any]) -> list[OpenAIFunctionToolSchema]:
    """Read the tools of a body. Those that are not functions of the client are left out.

    Args:
        functions: By the field of the body, the function of each tool; None if it is none.

    Raises:
        CallError: If a function is not valid.
    """
    return [read_tool(one, param) for param, one in functions.items() if one is not None]


class _Function(Body):
    name: str = ""
    namespace: str = ""


class _AllowedTool(_Function):
    function: _Function | None = None


class _Allowed(Body):
    mode: Literal["auto", "required"] = "auto"
    tools: list[_AllowedTool]


def narrow_tools(
    tools: list[OpenAIFunctionToolSchema], choice: BaseModel
) -> tuple[list[OpenAIFunctionToolSchema], str]:
    """Obey a `tool_choice` of the type `allowed_tools`: the policy gets only these tools.

    Args:
        tools: Of the body.
        choice: The `tool_choice`. The list is in it, or in its field `allowed_tools`.

    Returns:
        The allowed tools, and the mode.

    Raises:
        CallError: If there is no list, or it names no function of the body.
    """
    given = choice.model_dump()
    allowed = _validated(_Allowed, given.get("allowed_tools", given), "tool_choice.allowed_tools")
    named = [one.function or one for one in allowed.tools]
    names = [qualify(one.namespace, one.name) for one in named]
    kept = [tool for tool in tools if tool.name in names]
    if not kept:
        raise CallError(
            f"tool_choice: allowed_tools names {names}, and tools has none of them: expected names "
            "of functions in tools",
            code="invalid_tool",
            param="tool_choice",
        )
    return kept, allowed.mode


def qualify(space: str, name: Any) -> Any:
    """Return the name that the policy uses for a function, which may be in a namespace."""
    return f"{space}__{name}" if space else name


def read_tool(function: Any, param: str) -> OpenAIFunctionToolSchema:
    """Read the schema of a tool; equal schemas are one object, which templates cache by identity.

    Raises:
        CallError: If it is not valid.
    """
    if isinstance(function, dict):
        items = cast("dict[str, Any]", function).items()
        function = {key: value for key, value in items if value is not None}
    return _read_tool(json.dumps(function), param)


@lru_cache(maxsize=4096)
def _read_tool(text: str, param: str) -> OpenAIFunctionToolSchema:
    given = {"type": "function", "function": json.loads(text)}
    return _validated(OpenAIFunctionToolSchema, given, param)


def _validated(model: type[M], given: Any, param: str) -> M:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = f"{param}: {where}: {first['msg']}"
        raise CallError(message, code="invalid_tool", param=param) from None


def read_arguments(name: str, call_id: str, text: str, param: str) -> SentCall:
    """Read a tool call of a history, with its arguments as JSON.

    Raises:
        CallError: If the arguments are not a JSON object.
    """
    decoded = decode_json(text or "{}")
    if decoded.reason or not isinstance(decoded.value, dict):
        raise CallError(
            f"{param}: the arguments of the call of {name!r} are not a JSON object",
            code="invalid_arguments",
            param=param,
        )
    Budget().walk(decoded.value, param, inside=Inside("arguments", 0))
    return SentCall(call_id, name, cast("dict[str, Any]", decoded.value), text)


class Part(Body):
    """A part of a content."""

    type: str
    text: str | None = None


TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are texts."""


def read_content(content: str | Sequence[Part] | None, param: str) -> tuple[str, Form]:
    """Join the text parts of a content by line breaks.

    Raises:
        CallError: For a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or "", "null" if content is None else "text"
    for index, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise CallError(
                f"{param}[{index}] has the type {part.type!r}; the gateway reads text only",
                code="unsupported_content",
                param=f"{param}[{index}].type",
            )
    return "\n".join(part.text for part in content if part.text), "parts"


def read_sampling(body: BaseModel) -> dict[str, float]:
    """Return the sampling parameters that a body sets."""
    names = ("temperature", "top_p", "top_k")
    given = {name: getattr(body, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def find_ignored(
    body: BaseModel, harmless: frozenset[str], left_out: Mapping[str, bool]
) -> tuple[str, ...]:
    """Return the names of fields that were sent and have no effect, or not their whole effect.

    Args:
        body: What was sent.
        harmless: Unknown fields that have no effect on a completion anywhere.
        left_out: Known fields, and whether something in them was left out.
    """
    extra = body.model_extra or {}
    unknown = {k for k, v in extra.items() if k not in harmless and v not in _UNSET}
    # The names become metrics and a header, so a client does not choose them freely.
    named = {name if _FIELD.fullmatch(name) else "other" for name in unknown}
    named |= {name for name, is_cut in left_out.items() if is_cut}
    return tuple(sorted(named)[:_MAX_NAMED])


_FIELD = re.compile("[a-z][a-z0-9_]{0,39}")
_MAX_NAMED = 32
_UNSET: tuple[Any, ...] = (None, [], {}, "")


def cut_text(text: str, size: int = 64) -> Iterator[str]:
    """Cut a text into the pieces of a stream."""
    for start in range(0, len(text), size):
        yield text[start : start + size]
