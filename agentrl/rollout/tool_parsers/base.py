"""The base class of tool parsers, which find the calls in the text of one turn and never raise.

A parser reads only text that was decoded from sampled tokens. It scans from left to right. Text
inside a thought is not a call, and there is no call after a thought that is never closed. The tags
of a thought are the template's own (`ToolParser.with_thoughts`).
"""

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, NamedTuple, Self, cast

from agentrl.messages import (
    USUAL_THOUGHTS,
    FunctionCall,
    OpenAIFunctionToolSchema,
    Role,
    ToolCall,
)

Tools = Sequence[OpenAIFunctionToolSchema]

AFTER_THOUGHT = "(?<=AFTER_THOUGHT)"
"""In an opener: after the end of a thought."""
Span = tuple[int, int]
"""The characters of a call in its turn, as (start, end) with `end` excluded. Calls of one list
share that of the list. None: unknown."""
CALL_ID = "call{number:05d}"
"""Form of the id of a call; nine characters, because some templates refuse other ids."""
MAX_DEPTH = 64
"""Maximum nesting of a call's arguments: enough for any tool, and few enough for every JSON
library."""


@dataclass(frozen=True)
class ParsedCall:
    """One call that can be read."""

    name: str
    arguments: dict[str, Any]
    index: int = 0
    """Index among all calls of the turn, malformed ones included."""
    span: Span | None = field(default=None, compare=False)
    given_id: str = field(default="", compare=False)
    """The id that the policy wrote, or that the conversation gave; empty: none yet."""

    @property
    def id(self) -> str:
        """The id that its result refers to."""
        return self.given_id or call_id(self.index)

    @cached_property
    def tool_call(self) -> ToolCall:
        """The call as a part of an assistant message."""
        return ToolCall(id=self.id, function=FunctionCall(name=self.name, arguments=self.arguments))


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A piece of text that is meant as a call but cannot be one."""

    text: str
    """The piece, as sampled."""
    reason: str
    """What is wrong, for the model."""
    name: str = ""
    """The name of the intended tool, if it can be read."""
    index: int = 0
    """Index among all calls of the turn."""
    span: Span | None = field(default=None, compare=False)
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """The arguments, if they can be read: those of a call that the tools' schemas refuse."""
    given_id: str = field(default="", compare=False)
    """As in `ParsedCall`."""
    is_readable: bool = field(default=False, compare=False)
    """Whether the parser could read it, but its tool does not exist or refuses its arguments."""

    @property
    def id(self) -> str:
        """The id that its error refers to."""
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
        """Number of calls of the turn, malformed ones included."""
        return len(self.calls) + len(self.malformed)

    def numbered(
        self, first: int, taken: Collection[str] = (), form: str = CALL_ID
    ) -> "ParsedTurn":
        """Give ids to calls without one. `first` calls precede them in the conversation.

        Args:
            first: Number of the first call.
            taken: Ids that the conversation has. No new id repeats one.
            form: Form of the ids (`ToolParser.id_form`).
        """
        found = sorted([*self.calls, *self.malformed], key=lambda call: call.index)
        given, numbers = {call.given_id for call in found}, count(first)
        ids: list[str] = []
        for call in found:
            free = (form.format(name=call.name or "unknown", number=n) for n in numbers)
            ids.append(next(id for id in free if id not in taken and id not in given))
        calls = [
            ParsedCall(c.name, c.arguments, c.index, c.span, c.given_id or ids[c.index])
            for c in self.calls
        ]
        malformed = [replace(c, given_id=c.given_id or ids[c.index]) for c in self.malformed]
        return ParsedTurn(self.content, calls, malformed)


class Problem(NamedTuple):
    """Why a piece of text is not a call."""

    reason: str
    name: str = ""
    id: str = ""
    """As in `Call`."""


class Call(NamedTuple):
    """A call without its index in the turn."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The id that the policy wrote, if its format has one."""


class Piece(NamedTuple):
    """A span of text and its calls; none if it is plain text."""

    end: int
    """The index after the last character."""
    found: tuple[Call | Problem, ...]
    rest: str = ""
    """Its text without its calls, if all of them can be read."""
    is_located: bool = True
    """Whether the span contains the calls and nothing else."""


class ToolParser(ABC):
    """Finds the calls in a turn. Register a subclass with `register_tool_parser`."""

    opener: ClassVar[str]
    """Regular expression of what may start a call."""
    thought_tags: Mapping[str, str] = USUAL_THOUGHTS
    """Opening and closing tags of thoughts, in which nothing is a call."""
    id_form: str = CALL_ID
    """Form of the ids of calls of which the policy writes none, with `name` and `number`."""
    result_role: Role = "tool"
    """Role of the message that answers a call."""

    @abstractmethod
    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read the piece that starts with an opener.

        Args:
            text: The whole turn.
            start: Index of the opener.
            body: Index after the opener.
            tools: The tools in the prompt.
        """

    def check_tools(self, tools: Tools) -> None:  # noqa: B027 - most formats call any tool
        """Check that the tools of a run can be called in this format.

        Raises:
            ConfigError: if the format calls a tool or a parameter that the run does not have.
        """

    @property
    def closers(self) -> Collection[str]:
        """Texts that end a call. A stop token among them is a part of the text that is read."""
        return ()

    def render_result(self, text: str) -> str:
        """Return a result in the form that the policy expects."""
        return text

    def with_thoughts(self, tags: Mapping[str, str]) -> Self:
        """Return this parser for a template with these opening and closing tags of thoughts."""
        made = copy.copy(self)
        made.thought_tags = tags
        vars(made).pop("_scan", None)
        return made

    def parse(self, text: str, *, starts_in_thought: bool = False, tools: Tools = ()) -> ParsedTurn:
        """Find the calls in a turn; raises nothing, whatever the text is.

        Args:
            text: Decoded from sampled tokens.
            starts_in_thought: Whether the generation prompt opened a thought.
            tools: The tools in the prompt.
        """
        turn = _Turn(text)
        tags = self.thought_tags
        position = (
            min(_index_after(text, end, 0) for end in tags.values()) if starts_in_thought else 0
        )
        while match := self._scan.search(text, position):
            if match[0] in tags:
                position = _index_after(text, tags[match[0]], match.end())
            else:
                piece = self.read(text, match.start(), match.end(), tools)
                found = [_in_depth(item) for item in piece.found]
                turn.add(match.start(), piece._replace(found=tuple(found)))
                position = max(piece.end, match.end(), match.start() + 1)
        return turn.parsed()

    @cached_property
    def _scan(self) -> re.Pattern[str]:
        """Matches the start of a thought or a call."""
        after = "|".join(f"(?<={re.escape(end)})" for end in self.thought_tags.values())
        opener = self.opener.replace(AFTER_THOUGHT, f"(?:{after})")
        return re.compile("|".join([*map(re.escape, self.thought_tags), f"(?:{opener})"]))


def call_id(number: int) -> str:
    """Return the id of a call, in the usual form."""
    return CALL_ID.format(number=number)


class _Turn:
    """Collects the pieces of a turn, and the text between calls."""

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
            given_id = "" if found.id in self._ids else found.id
            self._ids.add(given_id)
            if isinstance(found, Call):
                self._calls.append(ParsedCall(found.name, found.arguments, index, span, given_id))
            else:
                text = self._text[start : piece.end]
                self._malformed.append(
                    MalformedCall(text, found.reason, found.name, index, span, given_id=given_id)
                )
        if piece.found and all(isinstance(found, Call) for found in piece.found):
            self._kept += [self._text[self._position : start], piece.rest]
            self._position = piece.end

    def parsed(self) -> ParsedTurn:
        rest = self._text[self._position :]
        content = "".join([*self._kept, rest])
        return ParsedTurn(content.strip() if self._calls else content, self._calls, self._malformed)


def _in_depth(found: Call | Problem) -> Call | Problem:
    """Refuse arguments that are nested too deeply to be written."""
    level: list[Any] = [found.arguments] if isinstance(found, Call) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return found
    reason = f"its arguments are nested deeper than {MAX_DEPTH} levels"
    return Problem(reason, found.name, found.id)


def _inner(outer: Any) -> Collection[Any]:
    if isinstance(outer, dict):
        return cast("dict[str, Any]", outer).values()
    return cast("list[Any]", outer) if isinstance(outer, list) else ()


def _index_after(text: str, closing: str, position: int) -> int:
    end = text.find(closing, position)
    return len(text) if end < 0 else end + len(closing)
