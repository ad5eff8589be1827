"""Agents that drive a request: the state machine, agent loops of users, external programs.

Names load on first use; importing this package loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.agent_loops.base import AgentLoopBase, DictConfigWrap, ToolListWrap
    from agentrl.agent_loops.output import AgentLoopMetrics, AgentLoopOutput
    from agentrl.agent_loops.registry import register
    from agentrl.agent_loops.server_manager import AsyncLLMServerManager, TokenOutput
    from agentrl.agent_loops.single_turn import SingleTurnAgentLoop

__all__ = [
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "DictConfigWrap",
    "SingleTurnAgentLoop",
    "TokenOutput",
    "ToolListWrap",
    "register",
]

_HOMES = {
    "AgentLoopBase": "base",
    "AgentLoopMetrics": "output",
    "AgentLoopOutput": "output",
    "AsyncLLMServerManager": "server_manager",
    "DictConfigWrap": "base",
    "SingleTurnAgentLoop": "single_turn",
    "TokenOutput": "server_manager",
    "ToolListWrap": "base",
    "register": "registry",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl.agent_loops' has no attribute {name!r}")
    return getattr(import_module(f"agentrl.agent_loops.{_HOMES[name]}"), name)
