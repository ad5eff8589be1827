"""What all requests of a run share: who generates, who reads, who answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.schema.run import MultiTurnConfig
from agentrl.engines.protocol import Engine
from agentrl.errors import ConfigError
from agentrl.interactions.base import BaseInteraction
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.fitting import EncodedPrompt, TextFitter
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import Capability, ChatTemplate, TemplateReport
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.rollout.tool_parsers import ToolParser, expected_formats, get_tool_parser
from agentrl.tools.base import BaseTool


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What all requests of a run share."""

    engine: Engine
    template: ChatTemplate
    parser: ToolParser
    caller: ToolCaller
    fitter: TextFitter
    tools: Sequence[BaseTool]
    interactions: Mapping[str, BaseInteraction]
    settings: MultiTurnConfig
    encode_prompt: Callable[[AsyncRolloutRequest], EncodedPrompt]
    """Renders a request's prompt within its budget."""
    check_tokens: Callable[[AsyncRolloutRequest, Callable[[], Sequence[str]]], None]
    """Holds a finished ledger against its conversation, and records what differs; the function
    gives the ledger's wording, part by part."""


_IN_ORDER = ("hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic", "json")
"""From the most particular format to the most general."""


def choose_parser(name: str | None, report: TemplateReport) -> ToolParser:
    """Choose the parser that reads what the template itself writes of a tool call.

    Args:
        name: `rollout.multi_turn.format`; None looks at the template.
        report: What the probe found out about the template.

    Raises:
        ConfigError: for an unknown name, or a template whose calls no known format reads.
    """
    if name is not None:
        return get_tool_parser(name)
    for candidate in _IN_ORDER:
        parser = get_tool_parser(candidate)
        if reads_example(parser, report.call_example):
            return parser
    if report.call_example is None:
        reason = report.capability(Capability.CALLS).reason
        what = f"the chat template {report.template!r} writes no tool call to read a format from"
        what += f": {reason}" if reason else ""
    else:
        what = (
            f"no tool-call format of agentrl's own reads what the chat template "
            f"{report.template!r} writes: {report.call_example!r}"
        )
    raise ConfigError(what, key="rollout.multi_turn.format", expected=expected_formats())


def reads_example(parser: ToolParser, example: str | None) -> bool:
    """Whether a parser reads the probe's call out of the template's rendering of it."""
    schema = {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    tools = [OpenAIFunctionToolSchema.model_validate(schema)]
    parsed = parser.parse(example or "", tools=tools)
    found = [(call.name, call.arguments) for call in parsed.calls]
    return found == [("probe_tool", {"city": "Oslo"})] and not parsed.malformed
