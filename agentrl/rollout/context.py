"""What all requests of a run share, and the choice of the tool-call format."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.schema.run import MultiTurnConfig
from agentrl.engines.protocol import Engine
from agentrl.errors import ConfigError
from agentrl.interactions.base import BaseInteraction
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.fitting import EncodedPrompt, TextFitter
from agentrl.rollout.media import RequestMedia
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import Capability, ChatTemplate, TemplateReport
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


_FORMATS = ("hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic", "json")
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
        if (
            parser.closers
            and report.call_example
            and not reads_example(parser, report.call_example)
        ):
            raise ConfigError(
                f"the format {name} does not read the tool calls of the chat template "
                f"{report.template!r}: {report.call_example!r}",
                key="rollout.multi_turn.format",
                expected="a format that reads them, or null: the first one that does",
            )
        return parser
    for candidate in _FORMATS:
        parser = get_tool_parser(candidate)
        if reads_example(parser, report.call_example):
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


_EXAMPLE_TOOL = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
)


def reads_example(parser: ToolParser, example: str | None) -> bool:
    """Whether a parser reads the example call as the template rendered it."""
    parsed = parser.parse(example or "", tools=[_EXAMPLE_TOOL])
    found = [(call.name, call.arguments) for call in parsed.calls]
    return found == [("probe_tool", {"city": "Oslo"})] and not parsed.malformed
