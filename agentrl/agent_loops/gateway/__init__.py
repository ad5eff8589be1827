"""The gateway: an HTTP server that serves the policy to agents of users, and keeps the tokens.

Agents speak OpenAI's or Anthropic's API. `Gateway.session` serves one request; the key that it
gives names the request. `trajectory` keeps the sampled tokens, `histories` matches what clients
send to them, and each dialect is one module.
"""

from agentrl.agent_loops.gateway.server import Gateway
from agentrl.agent_loops.gateway.sessions import GatewaySession, GatewaySettings

__all__ = ["Gateway", "GatewaySession", "GatewaySettings"]
