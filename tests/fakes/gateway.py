"""A gateway with a scripted policy, for tests of its dialects and of agents."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.agent_loops.gateway import Gateway, GatewaySession, GatewaySettings
from agentrl.engines.scripted import Answer, Script, ScriptedEngine
from agentrl.rollout.request import AsyncRolloutRequest
from tests.fakes.plugins import make_context, make_request, tiny_tokenizer

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["q"],
        },
    },
}


@dataclass(frozen=True)
class Served:
    """An open session, and what is around it."""

    session: GatewaySession
    request: AsyncRolloutRequest
    engine: ScriptedEngine
    gateway: Gateway


@asynccontextmanager
async def serve(
    answers: Sequence[Answer] | Script,
    *,
    settings: GatewaySettings | None = None,
    multi_turn: dict[str, Any] | None = None,
    **fields: Any,
) -> AsyncIterator[Served]:
    """Serve one request with a scripted policy; `fields` are those of the request."""
    engine = ScriptedEngine(answers, tokenizer=tiny_tokenizer())
    context = make_context(engine, **multi_turn or {})
    request = make_request(**fields)
    async with Gateway(settings) as gateway, gateway.session(request, context) as session:
        yield Served(session, request, engine, gateway)
