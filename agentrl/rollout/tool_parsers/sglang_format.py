"""The formats `sglang:NAME`: any parser of the installed SGLang, with agentrl's rules."""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

from agentrl.engines.sglang.parsers import (
    DetectedCall,
    Detection,
    Detector,
    Once,
    SGLangDetector,
    texts_in,
)
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.argument_schemas import property_types
from agentrl.rollout.tool_parsers.accounting import find_unread
from agentrl.rollout.tool_parsers.base import CALL_ID, Call, Piece, Problem, ToolParser, Tools
from agentrl.rollout.tool_parsers.harmony import HarmonyParser
from agentrl.rollout.tool_parsers.json_calls import CALL_SHAPED, read_arguments
from agentrl.rollout.tool_parsers.registry import register_tool_parser_family

MAX_CUTS = 8
"""Maximum thoughts after the start of a call that are tried: a thought may be text in its
arguments."""
MAX_PARTS = 64
"""Maximum calls of a region that are read one by one if one of them is broken."""
_CALL_LIKE = re.compile(rf"{CALL_SHAPED}|\[\s*[A-Za-z_][\w.]*\(")


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of the text outside thoughts, as a detector reads it."""

    text: str
    detection: Detection
    openers: tuple[str, ...]
    """What starts a call of the format."""
    pairs: Mapping[str, str]
    """What starts and what ends the parts of a call."""

    @property
    def unclosed(self) -> str:
        """The end of a part of which starts and ends do not match; empty if there is none."""
        ends = (end for start, end in self.pairs.items() if self.count(start) != self.count(end))
        return next(ends, "")

    @property
    def num_lost(self) -> int:
        """Calls that start in it and were not read."""
        detection = self.detection
        is_refused = detection.is_meant and not detection.calls
        least = int(is_refused and (bool(detection.complaint) or not self.openers))
        is_open = bool(detection.calls and self.unclosed)
        return max(least, int(is_open), self.num_begun - len(detection.calls))

    @property
    def num_begun(self) -> int:
        """Calls, or lists of calls, that start in it."""
        return max(map(self.count, self.openers), default=0)

    @property
    def main_opener(self) -> str:
        """What starts most of them: a single call rather than a list."""
        return max(self.openers, key=self.count, default="")

    def count(self, opener: str) -> int:
        """Count a start or an end from the first start, outside the arguments that were read."""
        texts = [text for call in self.detection.calls for text in texts_in(call.arguments)]
        quoted = filter(self._is_quoted, texts)
        starts = (self.text.find(text) for text in (*self.openers, *self.pairs))
        first = min((start for start in starts if start >= 0), default=0)
        return self.text.count(opener, first) - sum(text.count(opener) for text in quoted)

    def _is_quoted(self, value: str) -> bool:
        """Whether a value is between quotes, or no part of a call starts or ends in it alone."""
        forms = json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)
        return any(form in self.text for form in forms) or all(
            value.count(start) == value.count(end) for start, end in self.pairs.items()
        )


class DetectorParser(ToolParser):
    """What a detector of SGLang finds in a turn.

    A detector does not know thoughts, and drops what it cannot read. This parser gives it one part
    of the text outside thoughts at a time, and counts the calls that start in it: those that the
    detector does not read are malformed. The text that it leaves is the content; most detectors
    drop the text after their first call.

    Args:
        detector: Reads the calls.
        id_form: See `ToolParser.id_form`.
    """

    opener = r"(?s:.)"

    def __init__(self, detector: Detector, id_form: str = CALL_ID) -> None:
        self._detector = detector
        self.id_form = id_form

    @property
    def closers(self) -> Collection[str]:
        """See `ToolParser.closers`."""
        return self._detector.pairs.values()

    def read(self, text: str, start: int, body: int, tools: Tools) -> Piece:
        """Read up to the next thought that is not text in a call's arguments."""
        if not tools:
            return Piece(len(text), ())
        nearest = None
        for end in _ends(text, start, self.thought_tags):
            region = self._read_region(text[start:end], tools)
            found = self._found_in(region, tools)
            if not region.num_lost and all(isinstance(item, Call) for item in found):
                return Piece(end, found, rest=region.detection.rest, is_located=False)
            nearest = nearest or (region, found)
        assert nearest is not None  # a text has an end
        region, found = nearest
        found = self._read_one_by_one(region, tools) if region.num_lost else found
        return Piece(start + len(region.text), found, is_located=False)

    def _read_region(self, text: str, tools: Tools) -> _Region:
        detection = self._detector.detect(text.lstrip(), [_with_types(tool) for tool in tools])
        return _Region(text, detection, self._detector.openers, self._detector.pairs)

    def _read_one_by_one(self, region: _Region, tools: Tools) -> tuple[Call | Problem, ...]:
        """Find out which of a region's calls cannot be read."""
        head, *bodies = region.text.split(region.main_opener) if region.num_begun else [""]
        if len(bodies) <= MAX_PARTS:
            texts = [f"{head}{region.main_opener}{body}" for body in bodies]
            parts = [self._read_region(text, tools) for text in texts]
            pairs = {start: end for start, end in region.pairs.items() if start not in head}
            if sum(len(part.detection.calls) for part in parts) >= len(region.detection.calls):
                found: list[Call | Problem] = []
                unclosed = ""
                for part, body in zip(parts, bodies, strict=True):
                    one = replace(part, text=f"{region.main_opener}{body}", pairs=pairs)
                    # What follows an open call may be the text of its arguments.
                    unclosed = unclosed or one.unclosed
                    found += (
                        [Problem(f"it is not closed by {unclosed}")]
                        if unclosed
                        else self._found_in(one, tools)
                    )
                return tuple(found) or (_problem(region),)
        return (_problem(region),)

    def _found_in(self, region: _Region, tools: Tools) -> tuple[Call | Problem, ...]:
        """Return the calls of a region that account for its text; else the problem."""
        calls = region.detection.calls
        if region.num_begun == 0:
            calls = tuple(call for call in calls if call.name)
        if region.num_lost and (not calls or region.unclosed):
            return (_problem(region),)
        found = tuple(map(_call_of, calls))
        if not found or not all(isinstance(item, Call) for item in found):
            return found
        reads = cast("tuple[Call, ...]", found)
        text = _texts_of_calls(region)
        reason = find_unread(text, reads)
        if reason and not region.pairs:
            reason = find_unread(self._without_prose(text, region, tools), reads)
        return tuple(Problem(reason, call.name, call.id) for call in reads) if reason else found

    def _without_prose(self, text: str, region: _Region, tools: Tools) -> str:
        """Return the shortest part of a text, between brackets, that is read as the same calls.

        What is around it is prose, unless it looks like a call.
        """

        def is_enough(part: str) -> bool:
            return self._read_region(part, tools).detection.calls == region.detection.calls

        ends = [match.end() for match in re.finditer(r"[\])}]", text)]
        end = bisect_left(ends, True, key=lambda end: is_enough(text[:end]))
        part = text[: ends[end]] if end < len(ends) else text
        starts = [match.start() for match in re.finditer(r"[\[{]", part)][::-1]
        start = bisect_left(starts, True, key=lambda start: is_enough(part[start:]))
        inner = part[starts[start] :] if start < len(starts) else part
        return text if _CALL_LIKE.search(text.replace(inner, "", 1)) else inner


@register_tool_parser_family("sglang:")
def sglang_parser(name: str) -> ToolParser:
    """Make a parser that uses one of SGLang's; that of gpt-oss reads few of the forms of a call.

    Raises:
        MissingExtraError: if SGLang is not installed.
        ConfigError: for a parser that the installed SGLang does not have.
    """
    detector = SGLangDetector(name)
    if name == "gpt-oss":
        return HarmonyParser()
    return DetectorParser(detector, detector.id_form or CALL_ID)


@Once
def _with_types(tool: OpenAIFunctionToolSchema) -> OpenAIFunctionToolSchema:
    """Return a schema in which each property has its `type`: SGLang reads nothing else."""
    parameters = tool.function.parameters
    found = {
        name: sorted(types - {"integer"} if "number" in types else types)
        for name, types in property_types(parameters).items()
        if types
    }
    known = cast("dict[str, Any]", parameters.get("properties", {}))
    typed = {
        name: {**known[name], "type": types[0] if len(types) == 1 else types}
        for name, types in found.items()
        if isinstance(known[name], dict) and "type" not in known[name]
    }
    if not typed:
        return tool
    function = tool.function.model_copy(
        update={"parameters": {**parameters, "properties": {**known, **typed}}}
    )
    return tool.model_copy(update={"function": function})


def _ends(text: str, start: int, tags: Iterable[str]) -> list[int]:
    """Return where a region may end: at one of the next thoughts, or with the text."""
    thoughts = re.compile("|".join(map(re.escape, tags))).finditer(text, start)
    ends = [match.start() for match in islice(thoughts, MAX_CUTS + 1)]
    return ends if len(ends) > MAX_CUTS else [*ends, len(text)]


def _call_of(detected: DetectedCall) -> Call | Problem:
    if not detected.name:
        return Problem("it has no name")
    return read_arguments(detected.name, detected.arguments)._replace(id=detected.id)


def _problem(region: _Region) -> Problem:
    unclosed = f"it is not closed by {region.unclosed}" if region.unclosed else ""
    return Problem(unclosed or region.detection.complaint or "it cannot be read as a call")


def _texts_of_calls(region: _Region) -> str:
    """Return a region's text without what is before, between and after its calls."""
    opener, endings = region.main_opener, tuple(region.pairs.values())
    if region.num_begun == 0:
        return region.text
    _, *bodies = region.text.split(opener)
    ends = [
        max((b.rfind(end) + len(end) for end in endings if end in b), default=0) for b in bodies
    ]
    cut = [body[: end or len(body)] for body, end in zip(bodies, ends, strict=True)]
    return opener + opener.join(cut)
