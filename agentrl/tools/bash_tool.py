"""Let the model run shell commands, in a sandbox, with files that stay for its request."""

from typing import Any

from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.sandbox import Sandbox, Session
from agentrl.sandbox.grading.grader import without_fence
from agentrl.tools.base import ToolResult
from agentrl.tools.sandbox_tool import SandboxTool, SandboxToolConfig

_SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": (
                "Run a shell command and see what it prints. Each call is a new shell in the same "
                "folder: files stay, `cd` and variables do not. There is no network."
            ),
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The command."}},
                "required": ["command"],
            },
        },
    }
)


class BashTool(SandboxTool[SandboxToolConfig]):
    """Runs shell commands; the files that one request writes die with it.

    Each call is a new shell (bash, where the machine has one) in the request's folder: files stay,
    the current folder and variables do not. The model sees the output, the errors behind it, the
    exit code where it is not 0, and why a command was stopped. A command that fails is the model's
    own business, so the call is `ok`; the metrics say how it ended, as those of `PythonTool` do.

    Args:
        config: `sandbox`: the keys of `SandboxConfig` (default: none; `timeout_s`, 10 seconds, is
            of one command; the tool's own `timeout_s` must be above it).
        tool_schema: What the model is told; None: the bundled schema.
    """

    keys_class = SandboxToolConfig
    lost_text = "Files are still there."

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Give the schema that a YAML need not repeat."""
        return self.tool_schema or _SCHEMA

    async def open_session(self, sandbox: Sandbox) -> Session:
        """Open a folder in which shells run."""
        return await sandbox.open_shell()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Run `parameters["command"]`.

        Raises:
            SandboxError: where the sandbox failed, and not the command.
        """
        return await self.run(instance_id, without_fence(str(parameters.get("command", ""))))
