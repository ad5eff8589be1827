"""The tool-call parsers of the installed SGLang, asked for plain records.

SGLang reads some forty formats (`FunctionCallParser`). A detector of its is asked for one text at a
time, with every tool name let through: which tools there are is for the rollout to say. It may
raise, drop what it cannot read, or search a hostile text for minutes; here it does none of that.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import Any, NamedTuple, Protocol

from agentrl.errors import ConfigError, MissingExtraError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.plugins.environment import install_command

Tools = Sequence[OpenAIFunctionToolSchema]

MAX_SECONDS = 2.0
"""CPU time of one text: some detectors take cubic time for a text that repeats itself."""
LOOKS = 10
"""How often the clock is looked at in so much time, once it may have passed."""
LONGEST_COMPLAINT = 200
_LOGGER = "sglang.srt.function_call"
_LET_THROUGH = "SGLANG_FORWARD_UNKNOWN_TOOLS"
"""The environment variable that detectors look at for each call of an unknown tool."""
_UNKNOWN_TOOL = "undefined function"
"""In the warning about a name that is no tool's: nothing is wrong with the call as a text."""
_OPENING_FIELDS = (
    "bot_token", "bot", "tool_call_start_token", "tool_call_begin", "tool_call_prefix",
    "invoke_start_token", "_tool_calls_marker", "_TOOL_CALL_START", "TOOL_CALL_START",
    "INVOKE_PREFIX",
)  # fmt: skip
"""What detectors call the texts with which a call, or a list of calls, begins."""
_OPENING_PATTERNS = ("func_call_regex", "invoke_regex")
"""What they call the patterns of a call; what is literal at their beginning begins a call."""
_LITERAL = re.compile(r"[^\\.^$*+?{}\[\]()]+")


class DetectedCall(NamedTuple):
    """A call as a detector gives it."""

    name: str
    arguments: str
    """Meant to be a JSON object."""


@dataclass(frozen=True, slots=True)
class Detection:
    """What a detector made of a text."""

    calls: tuple[DetectedCall, ...]
    """In its order."""
    rest: str
    """What it says the text is beside the calls."""
    is_meant: bool
    """Whether it takes the text for one with calls, be they readable or not."""
    complaint: str = ""
    """Why something could not be read, in its words; empty where it says nothing."""


class Detector(Protocol):
    """Reads the calls in a text; raises nothing, whatever the text is."""

    openers: tuple[str, ...]
    """What a call, or a list of calls, begins with; empty where no fixed text does."""

    def detect(self, text: str, tools: Tools) -> Detection:
        """Read a text that holds no thought.

        Args:
            text: Decoded from sampled tokens, control tokens included.
            tools: The tools that the model was told of, of which there must be one.
        """
        ...


class SGLangDetector:
    """One of SGLang's detectors; each text is read by a fresh one, since they keep a state.

    Args:
        name: As SGLang names it, such as `deepseekv3`.

    Raises:
        MissingExtraError: where SGLang is not installed.
        ConfigError: for a name that the installed version does not have, with those near it, and
            for a parser that needs more than a text.
    """

    def __init__(self, name: str) -> None:
        if name not in sglang_parser_names():
            raise _unknown(name)
        self._name = name
        try:
            self.openers = _openers(self._make([]).detector)
        except Exception as error:
            raise ConfigError(
                f"SGLang's parser {name!r} cannot be used on a text alone: {error}",
                key="rollout.multi_turn.format",
                expected="another parser",
            ) from error

    def detect(self, text: str, tools: Tools) -> Detection:
        """Read a text (see `Detector.detect`)."""
        complaints: list[str] = []
        try:
            with _listening(complaints), _unknown_tools_let_through(), limited(MAX_SECONDS):
                parser = self._make([_tool(schema) for schema in tools])
                is_meant = parser.has_tool_call(text)
                rest, found = parser.parse_non_stream(text)
                calls = tuple(DetectedCall(call.name or "", call.parameters) for call in found)
        except OutOfTimeError:
            why = f"it takes longer than {MAX_SECONDS:g} s to read"
            return Detection((), text, is_meant=True, complaint=why)
        except Exception as error:  # noqa: BLE001 - the boundary round a detector
            why = f"{type(error).__name__}: {error}"[:LONGEST_COMPLAINT]
            return Detection((), text, is_meant=True, complaint=why)
        return Detection(calls, rest, is_meant, "; ".join(complaints)[:LONGEST_COMPLAINT])

    def _make(self, tools: list[Any]) -> Any:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        return FunctionCallParser(tools, self._name)


def sglang_parser_names() -> list[str]:
    """List the parsers of the installed SGLang.

    Raises:
        MissingExtraError: where it is not installed.
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


def _tool(schema: OpenAIFunctionToolSchema) -> Any:
    from sglang.srt.entrypoints.openai.protocol import Tool

    return Tool.model_validate(schema.to_template())


def _openers(detector: Any) -> tuple[str, ...]:
    """Gather what a call begins with from what the detector knows of itself."""
    fields = [getattr(detector, name, None) for name in _OPENING_FIELDS]
    patterns = [getattr(detector, name, None) for name in _OPENING_PATTERNS]
    heads = [_LITERAL.match(pattern) for pattern in patterns if isinstance(pattern, str)]
    found = [field.strip() for field in fields if isinstance(field, str)]
    found += [head[0].strip() for head in heads if head]
    return tuple(dict.fromkeys(opener for opener in found if opener))


@contextmanager
def _listening(complaints: list[str]) -> Iterator[None]:
    """Collect what detectors log of a text, instead of letting it flood a run's output."""
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
    """Keeps the warnings that are about a text."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        if _UNKNOWN_TOOL not in told:
            self._kept.append(told.partition("\n")[0])


@contextmanager
def _unknown_tools_let_through() -> Iterator[None]:
    """Let detectors give calls of tools that they were not told of."""
    before = os.environ.get(_LET_THROUGH)
    os.environ[_LET_THROUGH] = "true"
    try:
        yield
    finally:
        del os.environ[_LET_THROUGH]
        if before is not None:
            os.environ[_LET_THROUGH] = before


class OutOfTimeError(BaseException):
    """A detector took too long; no `except Exception` of its keeps this."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in the block after so much CPU time of its own thread.

    Python's regular expressions listen to signals while they search. Signals reach the main thread
    alone; elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deadline = time.thread_time() + seconds

    def look_at_clock(number: int, frame: FrameType | None) -> None:
        if time.thread_time() >= deadline:
            raise OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, look_at_clock)
    # Again and again: the timer runs by the CPU time of all threads, an engine's among them, and a
    # detector may have caught the first.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / LOOKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def texts_in(arguments: str) -> list[str]:
    """List the texts in a call's arguments, keys included, however deep."""
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
