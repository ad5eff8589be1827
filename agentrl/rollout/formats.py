"""Choose the tool-call format of a run: the configured one, or the one of its chat template."""

from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.templates import Capability, TemplateReport
from agentrl.rollout.tool_parsers import ToolParser, expected_formats, get_tool_parser

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
