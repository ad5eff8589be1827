"""Let the model run shell commands, in a sandbox, with files that stay for its request."""

from typing import Any

from agentrl.sandbox import Sandbox, Session
from agentrl.sandbox.grading.grader import without_fence
from agentrl.tools.base import ToolResult
from agentrl.tools.bundled import function_schema, string_parameter
from agentrl.tools.sandbox_tool import SandboxTool


class BashTool(SandboxTool):
    """Run shell commands. The files that a request writes are deleted when it ends.

    Each call is a new shell (bash, if the machine has it) in the request's folder: files stay, the
    current folder and variables do not. The model sees the output, then the errors, the exit code
    if it is not 0, and why a command was stopped. A command that fails is not a failure of the
    tool, so the call is `ok`. The metrics say how the command ended, as those of `PythonTool` do.

    Args:
        config: `sandbox`: the keys of `SandboxConfig` (default: none). Its `timeout_s`, 10 seconds,
            limits one command; the tool's own `timeout_s` must be larger.
        tool_schema: Shown to the model; None: the bundled schema.
    """

    lost_text = "Files are still there."
    default_schema = function_schema(
        "bash",
        "Run a shell command and see what it prints. Each call is a new shell in the same "
        "folder: files stay, `cd` and variables do not. There is no network.",
        command=string_parameter("The command."),
    )

    async def open_session(self, sandbox: Sandbox) -> Session:
        """Open a folder in which shells run."""
        return await sandbox.open_shell()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Run `parameters["command"]`.

        Raises:
            SandboxError: if the sandbox failed, and not the command.
        """
        return await self.run(instance_id, without_fence(str(parameters.get("command", ""))))
