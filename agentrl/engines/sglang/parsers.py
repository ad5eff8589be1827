"""The tool-call parsers of the installed SGLang, with plain records as results.

SGLang reads about forty formats (`FunctionCallParser`). Its detectors get one text at a time, and
accept every tool name, because the rollout checks the names. A detector of SGLang may raise, drop
what it cannot read, or search a hostile text for minutes; `SGLangDetector` prevents all three.
"""
# pyright: reportMissingImports=false

import difflib
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from cachetools import LRUCache

from agentrl.errors import ConfigError, MissingExtraError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.plugins.environment import install_command

S = TypeVar("S")
T = TypeVar("T")
Tools = Sequence[OpenAIFunctionToolSchema]

MAX_SECONDS = 2.0
"""Most CPU seconds for one text: some detectors need cubic time for repeated text."""
CHECKS_PER_LIMIT = 10
"""How often the clock is checked in each `MAX_SECONDS`, once the time may have passed."""
MAX_COMPLAINT_CHARS = 200
_LOGGER = "sglang.srt.function_call"
_ALLOW_UNKNOWN_TOOLS = "SGLANG_FORWARD_UNKNOWN_TOOLS"
"""The environment variable that lets detectors return calls of unknown tools."""
_UNKNOWN_TOOL = "undefined function"
"""Part of the warning about an unknown tool name, which is not an error of the text."""
_OPENING_FIELDS = (
    "bot_token", "bot", "tool_call_start_token", "tool_call_begin", "tool_call_prefix",
    "invoke_start_token", "_tool_calls_marker", "_TOOL_CALL_START", "TOOL_CALL_START",
    "INVOKE_PREFIX",
)  # fmt: skip
"""Attributes of detectors with the text that begins a call, or a list of calls."""
_OPENING_PATTERNS = ("func_call_regex", "invoke_regex")
"""Attributes of detectors with the pattern of a call; its literal start begins a call."""
_CLOSING_FIELDS = {
    "tool_call_prefix": ("tool_call_function_end_token", "function_end_token"),
    "parameter_prefix": ("parameter_end_token",),
    "bot": ("suffix",),
}
"""Attributes with the text that ends what an attribute begins, if the names do not show it."""
_END_WORDS = {"bot": "eot", "start": "end", "begin": "end", "START": "END", "PREFIX": "SUFFIX"}
_ID_GROUP = "tool_call_id"
"""The group of a detector's pattern `tool_call_regex` that matches the id of a call."""
_TAG_LIKE = re.compile(r"\W.*\w|\w.*\W")
_PAIR_PATTERN = re.compile(r"([^\\.^$*+?{}\[\]()]+)\(?\.\*\?\)?([^\\.^$*+?{}\[\]()]+)")
_LITERAL = re.compile(r"[^\\.^$*+?{}\[\]()]+")


class DetectedCall(NamedTuple):
    """A call as a detector returns it."""

    name: str
    arguments: str
    """Should be a JSON object."""
    id: str = ""
    """The id that the policy wrote; empty if the format has none."""


@dataclass(frozen=True, slots=True)
class Detection:
    """A detector's result for a text."""

    calls: tuple[DetectedCall, ...]
    """In the detector's order."""
    rest: str
    """The text without the calls, according to the detector."""
    is_meant: bool
    """Whether the text seems to contain calls, readable or not."""
    complaint: str = ""
    """The detector's reason why something could not be read; empty without one."""


class Detector(Protocol):
    """Reads the calls in a text; never raises."""

    openers: tuple[str, ...]
    """The texts that begin a call or a list of calls; empty if no fixed text does."""
    pairs: Mapping[str, str]
    """The texts that begin a part of a call, and those that end it."""

    def detect(self, text: str, tools: Tools) -> Detection:
        """Read a text without thoughts.

        Args:
            text: Decoded from sampled tokens, control tokens included.
            tools: The tools in the prompt; at least one.
        """
        ...


class SGLangDetector:
    """One of SGLang's detectors. They have state, so each text gets a new one.

    Args:
        name: As SGLang names it, such as `deepseekv3`.

    Raises:
        MissingExtraError: SGLang is not installed.
        ConfigError: The installed version has no such parser (the error names similar ones), or the
            parser needs more than a text.
    """

    def __init__(self, name: str) -> None:
        if name not in sglang_parser_names():
            raise _unknown(name)
        self._name = name
        try:
            detector = self._make([]).detector
            self.openers = _openers(detector)
            self.pairs: Mapping[str, str] = _pairs(detector)
            pattern = getattr(detector, "tool_call_regex", None)
            self._calls = pattern if _ID_GROUP in getattr(pattern, "groupindex", ()) else None
        except Exception as error:
            raise ConfigError(
                f"SGLang's parser {name!r} cannot be used on a text alone: {error}",
                key="rollout.multi_turn.format",
                expected="another parser",
            ) from error

    @property
    def id_form(self) -> str | None:
        """Form of the ids of calls, with `name` and `number`; None if it writes none."""
        return "functions.{name}:{number}" if self._calls else None

    def detect(self, text: str, tools: Tools) -> Detection:
        """Read a text (see `Detector.detect`)."""
        complaints: list[str] = []
        try:
            with (
                _collecting_complaints(complaints),
                _allowing_unknown_tools(),
                limited(MAX_SECONDS),
            ):
                parser = self._make([_tool(schema) for schema in tools])
                is_meant = parser.has_tool_call(text)
                rest, found = parser.parse_non_stream(text)
                ids = (
                    [match[_ID_GROUP] for match in self._calls.finditer(text)]
                    if self._calls
                    else []
                )
        except OutOfTimeError:
            reason = f"reading it takes longer than {MAX_SECONDS:g} s"
            return Detection((), text, is_meant=True, complaint=reason)
        except Exception as error:  # noqa: BLE001 - the error boundary of a detector
            reason = f"{type(error).__name__}: {error}"[:MAX_COMPLAINT_CHARS]
            return Detection((), text, is_meant=True, complaint=reason)
        ids = ids if len(ids) == len(found) else [""] * len(found)
        calls = tuple(
            DetectedCall(call.name or "", call.parameters, id)
            for call, id in zip(found, ids, strict=True)
        )
        return Detection(calls, rest, is_meant, "; ".join(complaints)[:MAX_COMPLAINT_CHARS])

    def _make(self, tools: list[Any]) -> Any:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        return FunctionCallParser(tools, self._name)


def sglang_parser_names() -> list[str]:
    """List the parsers of the installed SGLang.

    Raises:
        MissingExtraError: It is not installed.
    """
    if find_spec("sglang") is None:
        raise MissingExtraError(
            "the parsers of SGLang need SGLang", install=install_command("sglang")
        )
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return sorted(FunctionCallParser.ToolCallParserEnum)


def _unknown(name: str) -> ConfigError:
    names = sglang_parser_names()
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    guess = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return ConfigError(
        f"the installed SGLang has no tool-call parser {name!r}{guess}",
        key="rollout.multi_turn.format",
        expected=f"sglang: and one of {', '.join(names)}",
    )


class Once(Generic[S, T]):
    """A function that converts each object once.

    Args:
        convert: The function. No object may be changed afterwards.
    """

    def __init__(self, convert: Callable[[S], T]) -> None:
        self._convert = convert
        # The value refers to the object, so that no later one has an `id` of the keys.
        self._known: LRUCache[int, tuple[S, T]] = LRUCache(1024)

    def __call__(self, item: S) -> T:
        """Convert an object, or return what it was converted to before."""
        if (found := self._known.get(id(item))) is None:
            found = self._known[id(item)] = item, self._convert(item)
        return found[1]


@Once
def _tool(schema: OpenAIFunctionToolSchema) -> Any:
    from sglang.srt.entrypoints.openai.protocol import Tool

    return Tool.model_validate(schema.to_template())


def _openers(detector: Any) -> tuple[str, ...]:
    """Return the texts that begin a call, from the detector's attributes."""
    fields = [getattr(detector, name, None) for name in _OPENING_FIELDS]
    patterns = [getattr(detector, name, None) for name in _OPENING_PATTERNS]
    heads = [_LITERAL.match(pattern) for pattern in patterns if isinstance(pattern, str)]
    found = [field.strip() for field in fields if isinstance(field, str)]
    found += [head[0].strip() for head in heads if head]
    return tuple(dict.fromkeys(opener for opener in found if opener))


def _pairs(detector: Any) -> dict[str, str]:
    """Return the texts that begin and end parts of a call, from the detector's attributes."""
    found: dict[str, str] = {}
    texts = {
        name: value.strip()
        for name in dir(detector)
        if isinstance(value := getattr(detector, name, None), str) and not name.startswith("__")
    }
    for name, text in texts.items():
        if match := _PAIR_PATTERN.fullmatch(text):
            found[match[1]] = match[2]
        names = [name.replace(word, end) for word, end in _END_WORDS.items() if word in name]
        closings = (texts.get(end) for end in (*names, *_CLOSING_FIELDS.get(name, ())))
        closing = next((text for text in closings if text and _TAG_LIKE.search(text)), None)
        if text and closing and closing != text:
            found[text] = closing
    return found


@contextmanager
def _collecting_complaints(complaints: list[str]) -> Iterator[None]:
    """Collect the warnings of detectors, and keep them out of the run's output."""
    logger, handler = logging.getLogger(_LOGGER), _Collector(complaints)
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(handler)


class _Collector(logging.Handler):
    """Collects the warnings about a text."""

    def __init__(self, complaints: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if _UNKNOWN_TOOL not in message:
            self._complaints.append(message.partition("\n")[0])


@contextmanager
def _allowing_unknown_tools() -> Iterator[None]:
    """Let detectors return calls of unknown tools."""
    before = os.environ.get(_ALLOW_UNKNOWN_TOOLS)
    os.environ[_ALLOW_UNKNOWN_TOOLS] = "true"
    try:
        yield
    finally:
        del os.environ[_ALLOW_UNKNOWN_TOOLS]
        if before is not None:
            os.environ[_ALLOW_UNKNOWN_TOOLS] = before


class OutOfTimeError(BaseException):
    """A detector took too long. It is a `BaseException`, so that the detector does not catch it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in the block after so many CPU seconds of its thread.

    Python's regular expressions handle signals during a search. Signals only reach the main thread;
    other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deadline = time.thread_time() + seconds

    def check_clock(number: int, frame: FrameType | None) -> None:
        if time.thread_time() >= deadline:
            raise OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, check_clock)
    # The signal is repeated: the timer counts the CPU time of all threads, also of an engine, and a
    # detector may catch the first error.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / CHECKS_PER_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def texts_in(arguments: str) -> list[str]:
    """Return the texts in a call's arguments, with keys, at any depth."""
    try:
        level: list[Any] = [json.loads(arguments)]
    except (ValueError, RecursionError):
        return [arguments]
    found: list[str] = []
    while level:
        item = level.pop()
        if isinstance(item, dict):
            level += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            level += item
        elif isinstance(item, str):
            found.append(item)
    return found
