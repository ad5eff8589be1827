"""`verl.tools.base_tool`: the base class of tools."""

from agentrl.compat.verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from agentrl.compat.verl.utils.rollout_trace import rollout_trace_op
from agentrl.tools.base import BaseTool

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse", "rollout_trace_op"]
