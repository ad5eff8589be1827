"""What all requests of a run share: who generates, who reads, who answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.schema.run import MultiTurnConfig
from agentrl.engines.protocol import Engine
from agentrl.interactions.base import BaseInteraction
from agentrl.rollout.observations import TextFitter
from agentrl.rollout.prompts import EncodedPrompt
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.rollout.tool_parsers import ToolParser
from agentrl.tools.base import BaseTool


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
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
