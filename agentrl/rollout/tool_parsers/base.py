"""What a tool parser is: it finds the calls in the text of one turn, and never raises.

A parser reads only text that was decoded from sampled tokens. It scans from left to right. Text
inside a thought is no call, and after a thought that is never closed there is none. A thought is
`<think>` to `</think>`, unless the format has other tags.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

from agentrl.messages import FunctionCall, OpenAIFunctionToolSchema, Role, ToolCall

Tools = Sequence[OpenAIFunctionToolSchema]

THOUGHT, THOUGHT_END = "<think>", "</think>"
Span = tuple[int, int]
"""Where the text of a call stands in its turn: the first character, and behind the last. Calls of
one list share that of the list. None: the format does not tell."""
MAX_DEPTH = 64
"""Levels of a call's arguments: enough for any tool, and few enough for every JSON library."""


@dataclass(frozen=True)
class ParsedCall:
    """One call that can be read."""

    name: str
    arguments: dict[str, Any]
    index: int = 0
    """Place among all calls of the turn, malformed ones included."""
    span: Span | None = field(default=None, compare=False)
    given_id: str = field(default="", compare=False)
    """The id that the policy wrote, or that the conversation gave; empty: none yet."""

    @property
    def id(self) -> str:
        """The id by which its result answers it."""
        return self.given_id or call_id(self.index)

    @cached_property
    def tool_call(self) -> ToolCall:
        """The call as it stands in an assistant message."""
        return ToolCall(id=self.id, function=FunctionCall(name=self.name, arguments=self.arguments))


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A piece of text that is meant as a call and cannot be one."""

    text: str
    """The piece, as sampled."""
    reason: str
    """What is wrong, in words for the model."""
    name: str = ""
    """The tool that is meant, where that much can be read."""
    index: int = 0
    """Place among all calls of the turn."""
    span: Span | None = field(default=None, compare=False)
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """What it asks for, where that much can be read: a call that the tools' schemas refuse."""
    given_id: str = field(default="", compare=False)
    """As for a call that can be read."""
    is_readable: bool = field(default=False, compare=False)
    """Whether the parser could read it: its tool does not exist, or refuses its arguments."""

    @property
    def id(self) -> str:
        """The id by which its error answers it."""
        return self.given_id or call_id(self.index)


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What one turn says, and which calls it makes."""

    content: str = ""
    """The text without the calls that could be read; thoughts and malformed calls stay in it."""
    calls: list[ParsedCall] = field(default_factory=list[ParsedCall])
    malformed: list[MalformedCall] = field(default_factory=list[MalformedCall])

    @property
    def num_calls(self) -> int:
        """Calls of the turn, malformed ones included."""
        return len(self.calls) + len(self.malformed)

    def numbered(self, first: int) -> "ParsedTurn":
        """Give ids to calls without one, unique in a conversation that has `first` calls before."""
        calls = [replace(c, given_id=c.given_id or call_id(first + c.index)) for c in self.calls]
        malformed = [replace(c, given_id=call_id(first + c.index)) for c in self.malformed]
        return ParsedTurn(self.content, calls, malformed)


class Problem(NamedTuple):
    """Why a piece of text is no call."""

    reason: str
    name: str = ""


class Call(NamedTuple):
    """A call, before it has its place in the turn."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The id that the policy wrote, if its format has one."""


class Piece(NamedTuple):
    """A span of text and what it means; nothing, where it turned out to be plain text."""

    end: int
    """Behind the last character."""
    found: tuple[Call | Problem, ...]
    rest: str = ""
    """What it says beside its calls, where all of them can be read."""
    is_located: bool = True
    """Whether it is the calls and nothing else."""


class ToolParser(ABC):
    """Find the calls in a turn. Subclass it and `register_tool_parser` the subclass."""

    opener: ClassVar[str]
    """Regular expression of what may begin a call."""
    thought_tags: ClassVar[Mapping[str, str]] = {THOUGHT: THOUGHT_END}
    """What opens a thought, in which nothing is a call, and what closes it."""
    result_role: Role = "tool"
    """Role of the message that answers a call."""

    @abstractmethod
    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read what begins at an opener.

        Args:
            text: The whole turn.
            start: First character of the opener.
            body: Behind the opener.
            tools: The tools that the model was told of.
        """

    def check_tools(self, tools: Tools) -> None:  # noqa: B027 - most formats call any tool
        """Check that the tools of a run can be called in this format.

        Raises:
            ConfigError: if the format calls a tool or a parameter that the run does not have.
        """

    def render_result(self, text: str) -> str:
        """Word a result as the policy expects it."""
        return text

    def parse(self, text: str, *, starts_in_thought: bool = False, tools: Tools = ()) -> ParsedTurn:
        """Find the calls in a turn; whatever the text is, this raises nothing.

        Args:
            text: Decoded from sampled tokens.
            starts_in_thought: The generation prompt opened a thought that the text goes on with.
            tools: The tools that the model was told of.
        """
        turn = _Turn(text)
        tags = self.thought_tags
        position = min(_behind(text, end, 0) for end in tags.values()) if starts_in_thought else 0
        while match := self._scan.search(text, position):
            if match[0] in tags:
                position = _behind(text, tags[match[0]], match.end())
            else:
                piece = self.read(text, match.start(), match.end(), tools)
                found = [_in_depth(item) for item in piece.found]
                turn.add(match.start(), piece._replace(found=tuple(found)))
                position = max(piece.end, match.end(), match.start() + 1)
        return turn.parsed()

    @cached_property
    def _scan(self) -> re.Pattern[str]:
        """Matches what begins a thought or a call."""
        return re.compile("|".join([*map(re.escape, self.thought_tags), f"(?:{self.opener})"]))


def call_id(number: int) -> str:
    """Name a call by its number; nine characters, since some templates refuse other ids."""
    return f"call{number:05d}"


class _Turn:
    """Collects the pieces of a turn, and the text between those that are calls."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._kept: list[str] = []
        self._position = 0
        self._calls: list[ParsedCall] = []
        self._ids: set[str] = set()
        self._malformed: list[MalformedCall] = []

    def add(self, start: int, piece: Piece) -> None:
        span = (start, piece.end) if piece.is_located else None
        for found in piece.found:
            index = len(self._calls) + len(self._malformed)
            if isinstance(found, Call):
                given_id = "" if found.id in self._ids else found.id
                self._ids.add(given_id)
                self._calls.append(ParsedCall(found.name, found.arguments, index, span, given_id))
            else:
                text = self._text[start : piece.end]
                self._malformed.append(MalformedCall(text, found.reason, found.name, index, span))
        if piece.found and all(isinstance(found, Call) for found in piece.found):
            self._kept += [self._text[self._position : start], piece.rest]
            self._position = piece.end

    def parsed(self) -> ParsedTurn:
        rest = self._text[self._position :]
        content = "".join([*self._kept, rest])
        return ParsedTurn(content.strip() if self._calls else content, self._calls, self._malformed)


def _in_depth(found: Call | Problem) -> Call | Problem:
    """Refuse arguments nested so deeply that they could not be written down."""
    level: list[Any] = [found.arguments] if isinstance(found, Call) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return found
    return Problem(f"its arguments are nested deeper than {MAX_DEPTH} levels", found.name)


def _inner(outer: Any) -> Collection[Any]:
    if isinstance(outer, dict):
        return cast("dict[str, Any]", outer).values()
    return cast("list[Any]", outer) if isinstance(outer, list) else ()


def _behind(text: str, closing: str, position: int) -> int:
    end = text.find(closing, position)
    return len(text) if end < 0 else end + len(closing)
