"""Let the model run Python, in a sandbox, with names and files that stay for its request."""

from typing import Any

from pydantic import Field

from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.sandbox import Sandbox, Session
from agentrl.sandbox.grading.grader import without_fence
from agentrl.tools.base import ToolResult
from agentrl.tools.sandbox_tool import SandboxTool, SandboxToolConfig

_SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": (
                "Run Python code and see what it prints, and the value of a last expression. "
                "Names and files stay for the next call. There is no network."
            ),
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code."}},
                "required": ["code"],
            },
        },
    }
)


class PythonToolConfig(SandboxToolConfig):
    """The keys of a `PythonTool`'s own."""

    echo_last_expression: bool = Field(default=True, strict=True)
    """Whether the value of a last expression is shown, as a notebook does."""


class PythonTool(SandboxTool[PythonToolConfig]):
    """Runs Python code; what one request defines and writes dies with it.

    The model sees what the code printed, then its errors (the traceback without lines of ours),
    then, where the code was stopped, why and what is lost. Code that raises is the model's own
    business, so such a call is `ok`, as one is whose code was stopped for what it used; how it
    ended stands in the call's metrics: `end` (`ok`, `error`, `timeout`, `cpu`, `memory`,
    `killed`), `seconds`, `num_cut_bytes`. Where the sandbox itself fails, the call crashed. A code
    fence round the argument is taken off.

    Args:
        config: `sandbox`: the keys of `SandboxConfig` (default: none; `timeout_s`, 10 seconds, is
            of one call's code; the tool's own `timeout_s` must be above it); `echo_last_expression`
            (default true): show the value of a last expression, as a notebook does.
        tool_schema: What the model is told; None: the bundled schema.
    """

    keys_class = PythonToolConfig
    lost_text = "Names that were defined are gone; files are still there."

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Give the schema that a YAML need not repeat."""
        return self.tool_schema or _SCHEMA

    async def open_session(self, sandbox: Sandbox) -> Session:
        """Open an interpreter."""
        return await sandbox.open_python()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Run `parameters["code"]` behind what ran before.

        Raises:
            SandboxError: where the sandbox failed, and not the code.
        """
        code = without_fence(str(parameters.get("code", "")))
        return await self.run(instance_id, code, echo=self._keys.echo_last_expression)
