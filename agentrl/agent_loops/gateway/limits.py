"""Limits of each body, the same in all dialects, and of the work of each agent on threads.

A body is checked before a record of it is made. Each limit is far above what coding agents send
(tens of tools, hundreds of messages, megabytes of tool output). They bound the time and the memory
that one body costs.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, cast

from pydantic_core import from_json

from agentrl.agent_loops.gateway.calls import CallError
from agentrl.plugins.cancellation import wait_despite_cancellation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """The most of everything that a body may have."""

    values: int = 100_000
    """Objects, lists and entries of the whole body; as many again of all arguments that are JSON in
    a text."""
    depth: Mapping[str, int] = field(
        default_factory=lambda: {"body": 128, "arguments": 128, "tools": 48}
    )
    """Levels of objects and lists, by the part of the body."""
    tool_values: int = 10_000
    """Values of `tools`, their schemas included."""
    tool_characters: int = 1 << 20
    """Characters of the texts of `tools`, and of their keys."""
    key_characters: int = 1024
    """Characters of a key, arguments excepted."""
    entries: Mapping[str, int] = field(
        default_factory=lambda: {
            "messages": 4096,
            "input": 4096,
            "content": 1024,
            "tool_calls": 1024,
            "tools": 512,
            "properties": 512,
            "stop": 64,
            "stop_sequences": 64,
        }
    )
    """Entries of a list or an object, by its field."""
    characters: Mapping[str, int] = field(
        default_factory=lambda: {
            "arguments": 1 << 20,
            **dict.fromkeys(("stop", "stop_sequences"), 1024),
            **dict.fromkeys(("id", "call_id", "tool_call_id", "tool_use_id"), 1024),
            **dict.fromkeys(("name", "namespace", "model", "role", "type"), 1024),
            "previous_response_id": 1024,
        }
    )
    """Characters of a text, by its field; for a list of texts, of each."""


LIMITS = Limits()
_INLINE_BYTES = 32 << 10
_INLINE_VALUES = 400
_PATH = 200
"""Characters of a path in an error."""


Part = Literal["body", "tools", "arguments"]
"""A part of a body, by which its limits differ."""


class Inside(NamedTuple):
    """What a value of a body is a part of."""

    part: Part
    """In arguments the policy chose the names of fields, so they have no limits of their own."""
    depth: int


OUTSIDE = Inside("body", 0)
_PARTS: Mapping[tuple[str, type], Part] = {
    ("tools", list): "tools",
    ("input", dict): "arguments",
}
"""By name and type, the fields with which a part begins."""


class AgentThread:
    """Runs the expensive work of one agent on a thread, one piece at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of the work. A cancelled caller waits for its end too.

        So an agent that hangs up and asks again does not use a second thread.
        """
        async with self._lock:
            running = asyncio.ensure_future(asyncio.to_thread(work))
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            await wait_despite_cancellation([running])
            return running.result()


def is_large(body: bytes) -> bool:
    """Whether reading a body on the event loop would delay the calls of other agents."""
    return len(body) > _INLINE_BYTES or _count_marks(body) > _INLINE_VALUES


def read_json(body: bytes) -> Any:
    """Read a body's JSON, and check its limits.

    Raises:
        CallError: If it exceeds a limit. Names the field and the limit.
        ValueError: If it is not JSON.
    """
    refuse_above(LIMITS.values, count_values(body), "values", "")
    value = from_json(body, cache_strings="keys")
    Budget().walk(value)
    return value


def count_values(text: bytes) -> int:
    """Return about how many values a JSON text has, without reading it: a few fast passes."""
    count = _count_marks(text)
    if count <= LIMITS.values:
        return count
    # Marks in strings do not count. Without escapes, every second piece is outside of strings.
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = text.count(b'"')
    if quotes > 4 * LIMITS.values:
        return quotes // 2
    return _count_marks(b"".join(text.split(b'"')[::2]))


def _count_marks(text: bytes) -> int:
    return sum(map(text.count, (b",", b"{", b"[")))


def refuse_above(limit: int, count: int, what: str, at: str) -> None:
    """Refuse a body of which a part exceeds its limit.

    Raises:
        CallError: If so.
    """
    if count > limit:
        raise CallError(
            f"{at or 'the body'}: {count} {what}; the gateway reads at most {limit}: send fewer",
            status=413,
            code="limit_exceeded",
            param=at or None,
        )


@dataclass(slots=True)
class Budget:
    """What a body has used up so far."""

    tool_values: int = 0
    tool_characters: int = 0
    argument_values: int = 0

    def walk(self, value: Any, at: str = "", key: str = "", inside: Inside = OUTSIDE) -> None:
        """Check a value and everything in it.

        Args:
            value: The JSON.
            at: Path of the field, for the error.
            key: Name of the field; for an entry of a list, that of the list.
            inside: What the value is a part of.

        Raises:
            CallError: If it exceeds a limit. Names the field and the limit.
        """
        if inside.part == "tools":
            self._count_in_tools(value)
        if isinstance(value, str):
            self._check_text(value, at, key, inside)
        if not isinstance(value, dict | list):
            return
        depth = inside.depth + 1
        refuse_above(LIMITS.depth[inside.part], depth, "levels", at)
        entries = cast("dict[str, Any] | list[Any]", value)
        if inside.part != "arguments":
            refuse_above(LIMITS.entries.get(key, len(entries)), len(entries), "entries", at)
        if isinstance(entries, list):
            inner = Inside(inside.part, depth)
            for index, one in enumerate(entries):
                self.walk(
                    one, f"{at}[{index}]"[:_PATH], "" if isinstance(one, list) else key, inner
                )
            return
        for name, one in entries.items():
            part = inside.part
            if part == "tools":
                self._count_in_tools(name)
            elif part == "body":
                part = _PARTS.get((name, type(one)), part)
                refuse_above(LIMITS.key_characters, len(name), "characters of a key", at)
            self.walk(one, f"{at}.{name}"[:_PATH].lstrip("."), name, Inside(part, depth))

    def _check_text(self, text: str, at: str, key: str, inside: Inside) -> None:
        if inside.part == "arguments":
            return
        refuse_above(LIMITS.characters.get(key, len(text)), len(text), "characters", at)
        if key == "arguments":
            self.argument_values += count_values(text.encode())
            refuse_above(LIMITS.values, self.argument_values, "values of all arguments", at)

    def _count_in_tools(self, value: Any) -> None:
        self.tool_values += 1
        self.tool_characters += len(value) if isinstance(value, str) else 0
        refuse_above(LIMITS.tool_values, self.tool_values, "values", "tools")
        refuse_above(LIMITS.tool_characters, self.tool_characters, "characters", "tools")
