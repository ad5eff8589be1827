"""What all requests of a run share, and the choice of the tool-call format."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.schema.run import MultiTurnConfig
from agentrl.engines.protocol import Engine
from agentrl.errors import ConfigError
from agentrl.interactions.base import BaseInteraction
from agentrl.rollout.fitting import EncodedPrompt, TextFitter
from agentrl.rollout.media import RequestMedia
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import Capability, ChatTemplate, TemplateReport
from agentrl.rollout.templates.probe_conversations import PARALLEL_CITIES, tool_schema
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.rollout.tool_parsers import ToolParser, expected_formats, get_tool_parser
from agentrl.tools.base import BaseTool


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """The parts of a run that all its requests share."""

    engine: Engine
    template: ChatTemplate
    parser: ToolParser
    caller: ToolCaller
    fitter: TextFitter
    media: RequestMedia
    """Loads images and videos, and puts them into messages."""
    tools: Sequence[BaseTool]
    interactions: Mapping[str, BaseInteraction]
    settings: MultiTurnConfig
    encode_prompt: Callable[[AsyncRolloutRequest], Awaitable[EncodedPrompt]]
    """Renders the prompt of a request within its budget."""
    check_tokens: Callable[[AsyncRolloutRequest, Callable[[], Sequence[str]]], None]
    """Compares a finished ledger with its conversation, and records the differences. The second
    argument returns the text of the ledger, part by part."""
    is_deterministic: bool = False
    """`rollout.deterministic`: the engine computes one call of each request at a time."""


_FORMATS = ("harmony", "hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic", "json")
"""Formats to try, from the most specific to the most general."""


def choose_parser(name: str | None, report: TemplateReport) -> ToolParser:
    """Choose the parser that reads the tool calls of a chat template.

    Args:
        name: `rollout.multi_turn.format`; None: the first format that reads the template's calls.
        report: Result of probing the template.

    Raises:
        ConfigError: If the name is unknown, or no known format reads the calls of the template.
    """
    if name is not None:
        parser = get_tool_parser(name)
        is_own = name not in _FORMATS and not name.startswith("sglang:")
        unread = None if is_own else find_unread_example(parser, report)
        if unread is None:
            return parser
        raise ConfigError(
            f"the format {name} does not read the tool calls of the chat template "
            f"{report.template!r}: {unread!r}",
            key="rollout.multi_turn.format",
            expected="a format that reads them, or null: the first one that does",
        )
    parsers = map(get_tool_parser, _FORMATS if report.call_example else ())
    for parser in parsers:
        if find_unread_example(parser, report) is None:
            return parser
    if report.call_example is None:
        reason = report.capability(Capability.CALLS).reason
        what = f"the chat template {report.template!r} does not render tool calls"
        what += f": {reason}" if reason else ""
    else:
        what = (
            f"no tool-call format of agentrl reads the tool calls of the chat template "
            f"{report.template!r}: {report.call_example!r}"
        )
    raise ConfigError(what, key="rollout.multi_turn.format", expected=expected_formats())


def find_unread_example(parser: ToolParser, report: TemplateReport) -> str | None:
    """Return how the template writes a call, or two, if a parser does not read it."""
    ends = ["", *(stop for stop in report.stop_tokens if stop in parser.closers)]
    examples = (report.call_example, ["Oslo"]), (report.parallel_call_example, PARALLEL_CITIES)
    for example, cities in examples:
        if example and not any(reads_example(parser, example + end, cities) for end in ends):
            return example
    return None


def reads_example(
    parser: ToolParser, example: str | None, cities: Sequence[str] = ("Oslo",)
) -> bool:
    """Whether a parser reads the calls of an example as the template rendered them."""
    parsed = parser.parse(example or "", tools=[tool_schema()])
    found = [(call.name, call.arguments) for call in parsed.calls]
    return found == [("probe_tool", {"city": city}) for city in cities] and not parsed.malformed
