"""The formats `sglang:NAME`: any parser of the installed SGLang, with agentrl's rules."""

from dataclasses import dataclass

from agentrl.engines.sglang.parsers import (
    DetectedCall,
    Detection,
    Detector,
    SGLangDetector,
    texts_in,
)
from agentrl.rollout.tool_parsers.base import THOUGHT, Call, Piece, Problem, ToolParser, Tools
from agentrl.rollout.tool_parsers.json_calls import read_arguments
from agentrl.rollout.tool_parsers.registry import register_tool_parser_family

MAX_CUTS = 8
"""Maximum thoughts after the start of a call that are tried: a thought may be text in its
arguments."""
MAX_PARTS = 64
"""Maximum calls of a region that are read one by one if one of them is broken."""


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of the text outside thoughts, as a detector reads it."""

    text: str
    detection: Detection
    openers: tuple[str, ...]
    """What starts a call of the format."""

    @property
    def num_lost(self) -> int:
        """Calls that start in it and were not read."""
        detection = self.detection
        is_refused = detection.is_meant and not detection.calls
        least = int(is_refused and (bool(detection.complaint) or not self.openers))
        return max(least, self.num_begun - len(detection.calls))

    @property
    def num_begun(self) -> int:
        """Calls, or lists of calls, that start in it."""
        return max(map(self.count, self.openers), default=0)

    @property
    def main_opener(self) -> str:
        """What starts most of them: a single call rather than a list."""
        return max(self.openers, key=self.count, default="")

    def count(self, opener: str) -> int:
        """Count an opener outside the arguments of the calls that were read."""
        quoted = [text for call in self.detection.calls for text in texts_in(call.arguments)]
        return self.text.count(opener) - sum(text.count(opener) for text in quoted)


class DetectorParser(ToolParser):
    """What a detector of SGLang finds in a turn.

    A detector does not know thoughts, and drops what it cannot read. This parser gives it one part
    of the text outside thoughts at a time, and counts the calls that start in it: those that the
    detector does not read are malformed. The text that it leaves is the content; most detectors
    drop the text after their first call.

    Args:
        detector: Reads the calls.
    """

    opener = r"(?s:.)"

    def __init__(self, detector: Detector) -> None:
        self._detector = detector

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read up to the next thought that is not text in a call's arguments."""
        if not tools:
            return Piece(len(text), ())
        first, *others = _ends(text, start)
        region = nearest = self._read_region(text[start:first], tools)
        while region.num_lost and others:
            region = self._read_region(text[start : others.pop(0)], tools)
        region = nearest if region.num_lost else region
        end = start + len(region.text)
        if region.num_lost:
            return Piece(end, self._read_one_by_one(region, tools), is_located=False)
        return Piece(end, _found_in(region), rest=region.detection.rest, is_located=False)

    def _read_region(self, text: str, tools: Tools) -> _Region:
        detection = self._detector.detect(text.lstrip(), tools)
        return _Region(text, detection, self._detector.openers)

    def _read_one_by_one(self, region: _Region, tools: Tools) -> tuple[Call | Problem, ...]:
        """Find out which of a region's calls cannot be read."""
        head, *bodies = region.text.split(region.main_opener) if region.num_begun else [""]
        if len(bodies) <= MAX_PARTS:
            texts = [f"{head}{region.main_opener}{body}" for body in bodies]
            parts = [self._read_region(text, tools) for text in texts]
            if sum(len(part.detection.calls) for part in parts) >= len(region.detection.calls):
                found = [item for part in parts for item in _found_in(part)]
                return tuple(found) or (_problem(region.detection),)
        return (*_found_in(region), _problem(region.detection))


@register_tool_parser_family("sglang:")
def sglang_parser(name: str) -> DetectorParser:
    """Make a parser that uses one of SGLang's.

    Raises:
        MissingExtraError: if SGLang is not installed.
        ConfigError: for a parser that the installed SGLang does not have.
    """
    return DetectorParser(SGLangDetector(name))


def _ends(text: str, start: int) -> list[int]:
    """Return where a region may end: at one of the next thoughts, or with the text."""
    ends: list[int] = []
    position = text.find(THOUGHT, start)
    while position >= 0 and len(ends) <= MAX_CUTS:
        ends.append(position)
        position = text.find(THOUGHT, position + 1)
    return ends if position >= 0 else [*ends, len(text)]


def _found_in(region: _Region) -> tuple[Call | Problem, ...]:
    """Return the calls of a region; if there is only a problem, the problem."""
    calls = region.detection.calls
    if region.num_begun == 0:
        calls = tuple(call for call in calls if call.name)
    if not calls and region.num_lost:
        return (_problem(region.detection),)
    return tuple(map(_call_of, calls))


def _call_of(detected: DetectedCall) -> Call | Problem:
    if not detected.name:
        return Problem("it has no name")
    return read_arguments(detected.name, detected.arguments)


def _problem(detection: Detection) -> Problem:
    return Problem(detection.complaint or "it cannot be read as a call")
