"""Choose the agent that drives each request.

`make_run` makes the `RunRequest` of a run. Every rollout manager gets it, in the trainer's process
and in rollout workers.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.agent_loops.external import ExternalAgent, check_external
from agentrl.agent_loops.gateway import Gateway, GatewaySettings
from agentrl.agent_loops.registry import (
    SINGLE_TURN,
    LoopEntry,
    load_agent_loops,
    registered_loops,
)
from agentrl.agent_loops.runner import AgentLoopRunner
from agentrl.agent_loops.single_turn import SingleTurnAgentLoop
from agentrl.config.schema.agent import TOOL_AGENT
from agentrl.config.schema.run import RunConfig
from agentrl.engines.protocol import CompletionSource
from agentrl.errors import ConfigError, DataError, Fault, did_you_mean
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import describe_failure
from agentrl.rollout.manager import RunRequest
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import StopReason

AGENT_NAME = "agent_name"
"""Column of a row that names its agent."""
EXTERNAL = "external"
"""Name of the agent of `rollout.agent.command` or `rollout.agent.python`."""


def make_run(config: RunConfig, tokenizer: Any) -> "AgentRouter":
    """Make the function that drives every request of a run.

    Args:
        config: The run; `rollout.agent` is read.
        tokenizer: The policy's tokenizer, for loops.

    Raises:
        ConfigError: If the configured agent does not exist.
    """
    agent = config.rollout.agent
    loops = load_loops(config)
    agents: dict[str, RunRequest] = {TOOL_AGENT: run_request}
    for name, entry in loops.items():
        agents[name] = AgentLoopRunner(entry, config, tokenizer)
    if agent.is_external:
        gateway = Gateway(GatewaySettings.of(agent.gateway))
        agents[EXTERNAL] = external = ExternalAgent(agent, gateway)
        return AgentRouter(agents, default=EXTERNAL, external=external)
    return AgentRouter(agents, default=agent.default_agent_loop)


def load_loops(config: RunConfig) -> dict[str, LoopEntry]:
    """Load the agent loops of a run, by name.

    Raises:
        ConfigError: If the default loop does not exist, or `agent_loop_config_path` is wrong.
        PluginError: If a class cannot be imported, or is no agent loop.
    """
    agent = config.rollout.agent
    path, default = agent.agent_loop_config_path, agent.default_agent_loop
    loops = {SINGLE_TURN: LoopEntry(SINGLE_TURN, SingleTurnAgentLoop), **registered_loops()}
    loops |= load_agent_loops(path) if path is not None else {}
    if default in loops:
        loops[default].check()
    elif default != TOOL_AGENT:
        names = [TOOL_AGENT, *loops]
        raise ConfigError(
            f"no agent is named {default!r}" + did_you_mean(default, names),
            key="rollout.agent.default_agent_loop",
            expected=f"one of {', '.join(sorted(names))}; `@register` adds a name if the key "
            "`plugins` names its module",
        )
    return loops


def check_agents(config: RunConfig) -> frozenset[str]:
    """Check that the agents of a run exist, without starting anything; return their names.

    Raises:
        ConfigError: See `make_run`.
        PluginError: For the module of a function or class that cannot be imported.
    """
    names, agent = {TOOL_AGENT, *load_loops(config)}, config.rollout.agent
    if agent.is_external:
        check_external(agent, runs_here=not config.asks_for_cluster)
        names.add(EXTERNAL)
    return frozenset(names)


class AgentRouter:
    """Drives each request by the agent that its row names; a `RunRequest`.

    Args:
        agents: Agents by name.
        default: Name of the agent of rows without the column `agent_name`.
        external: The external agent of the run; `shutdown` ends it.
    """

    name = "rollout.agent"

    def __init__(
        self,
        agents: Mapping[str, RunRequest],
        *,
        default: str,
        external: ExternalAgent | None = None,
    ) -> None:
        self._external = external
        self._agents = dict(agents)
        self._default = default

    async def __call__(
        self, request: AsyncRolloutRequest, context: RolloutContext, source: CompletionSource
    ) -> AsyncRolloutRequest:
        """Drive a pending request to its end; an unknown agent fails it."""
        name = request.columns.get(AGENT_NAME) or self._default
        run = self._agents.get(name)
        if run is None:
            error = DataError(
                f"the row's agent_name is {name!r}" + did_you_mean(str(name), self._agents),
                expected=f"one of {', '.join(sorted(self._agents))}",
            )
            request.finish(StopReason.FAILED, describe_failure(error, Fault.LIMIT, turn=0))
            return request
        return await run(request, context, source)

    async def shutdown(self) -> None:
        """End what the agents share: the gateway, and what starts their programs."""
        if self._external is not None:
            await self._external.close()
