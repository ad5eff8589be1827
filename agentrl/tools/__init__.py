"""Tools that a policy can call: the base class, function tools, the loaders of both.

Importing this package loads neither torch nor transformers.
"""

from agentrl.errors import ToolError
from agentrl.messages import OpenAIFunctionSchema, OpenAIFunctionToolSchema, ToolResponse
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.from_verl import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    rollout_trace_op,
)
from agentrl.tools.function_tool import function_tool
from agentrl.tools.registry import (
    initialize_tools_from_config,
    load_all_tools,
    load_function_tools,
)

__all__ = [
    "BaseTool",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "ToolError",
    "ToolResponse",
    "ToolResult",
    "function_tool",
    "initialize_tools_from_config",
    "load_all_tools",
    "load_function_tools",
    "rollout_trace_op",
]
