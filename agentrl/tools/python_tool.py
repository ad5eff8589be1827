"""Let the model run Python, in a sandbox, with names and files that stay for its request."""

from typing import Any

from pydantic import Field

from agentrl.sandbox import Sandbox, Session
from agentrl.sandbox.grading.grader import without_fence
from agentrl.tools.base import ToolResult
from agentrl.tools.bundled import function_schema, string_parameter
from agentrl.tools.sandbox_tool import SandboxTool, SandboxToolConfig


class PythonToolConfig(SandboxToolConfig):
    """The own keys of `PythonTool`."""

    echo_last_expression: bool = Field(default=True, strict=True)
    """Whether the value of a last expression is shown, as a notebook does."""


class PythonTool(SandboxTool):
    """Run Python code. What a request defines and writes is deleted when it ends.

    The model sees what the code printed, then its errors (the traceback without agentrl's lines),
    and, if the code was stopped, why and what is lost. Code that raises is not a failure of the
    tool, so the call is `ok`, also if the code was stopped for the resources it used. The call's
    metrics say how it ended: `end` (`ok`, `error`, `timeout`, `cpu`, `memory`, `killed`),
    `seconds`, `num_cut_bytes`. If the sandbox itself fails, the call crashed. A code fence around
    the argument is removed.

    Args:
        config: `sandbox`: the keys of `SandboxConfig` (default: none). Its `timeout_s`, 10 seconds,
            limits the code of one call; the tool's own `timeout_s` must be larger.
            `echo_last_expression` (default true): show the value of a last expression, as a
            notebook does.
        tool_schema: Shown to the model; None: the bundled schema.
    """

    keys_class = PythonToolConfig
    lost_text = "Names that were defined are gone; files are still there."
    default_schema = function_schema(
        "python",
        "Run Python code and see what it prints, and the value of a last expression. "
        "Names and files stay for the next call. There is no network.",
        code=string_parameter("The code."),
    )

    async def open_session(self, sandbox: Sandbox) -> Session:
        """Open an interpreter."""
        return await sandbox.open_python()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Run `parameters["code"]` in the request's interpreter.

        Raises:
            SandboxError: if the sandbox failed, and not the code.
        """
        code = without_fence(str(parameters.get("code", "")))
        return await self.run(instance_id, code, echo=self._keys.echo_last_expression)
