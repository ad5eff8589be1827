"""Let the model run code on a SandboxFusion service."""

from functools import partial
from typing import Any

from pydantic import Field

from agentrl.config.schema.section import Section
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.plugins.call import PerLoop
from agentrl.plugins.keys import read_keys
from agentrl.sandbox import Execution
from agentrl.sandbox.fusion import FusionClient
from agentrl.sandbox.grading.grader import without_fence
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.runtime.settings import SHARED_KEYS
from agentrl.tools.sandbox_tool import describe_execution, measure

_SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": (
                "Run a program and see what it prints. Each call is a program of its own: nothing "
                "stays from one to the next."
            ),
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The program."}},
                "required": ["code"],
            },
        },
    }
)


class SandboxFusionToolConfig(Section):
    """The tool's own keys, under the names that users of verl know."""

    sandbox_fusion_url: str = Field(min_length=1)
    """The service's address."""
    default_timeout: float = Field(default=30.0, gt=0)
    """Seconds of one program; keep the tool's `timeout_s` above it."""
    default_language: str = "python"
    """A language of the service, of calls that name none."""
    memory_limit_mb: int = Field(default=1024, ge=-1)
    """Megabytes of one program; -1: the service's limit."""
    num_workers: int = Field(default=10, ge=1)
    """Calls at once, over all requests."""
    enable_global_rate_limit: bool | None = None
    """true: `rate_limit` bounds the calls at once, as it does in verl; null: it is what it is for
    every tool, calls a second."""
    rate_limit: Any = None
    """See `enable_global_rate_limit`."""

    @property
    def max_concurrency(self) -> int:
        """Calls at once: verl's global limit is one of calls at work, not of calls a second."""
        if self.enable_global_rate_limit and self.rate_limit:
            return min(self.num_workers, int(self.rate_limit))
        return self.num_workers


class SandboxFusionTool(BaseTool):
    """Runs programs on a service, each by itself; for state across calls take `PythonTool` with
    `sandbox: {provider: sandbox_fusion}`.

    The model sees what the program printed, then its errors, and why it was stopped. A program
    that fails is the model's own business, so the call is `ok`, and its metrics say how it ended
    (see `PythonTool`). A service that fails or cannot be reached is a crash of the tool, which the
    tool's `retry` may repeat.

    Args:
        config: `sandbox_fusion_url` (needed); `default_timeout` (seconds of one program, 30.0;
            keep the tool's `timeout_s` above it); `default_language` (`python`); `memory_limit_mb`
            (megabytes, 1024; -1: the service's limit); `num_workers` (calls at once, 10). Beside
            verl's `enable_global_rate_limit: true`, `rate_limit` bounds the calls at once, as it
            does there; elsewhere it is what it is for every tool, calls a second.
        tool_schema: What the model is told; None: the bundled schema. Arguments `language` and
            `timeout` are read where it has them; no program gets more than `default_timeout`.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self._keys = read_keys(
            SandboxFusionToolConfig, config, key="config", also_known=SHARED_KEYS
        )
        config = {"max_concurrency": self._keys.max_concurrency, **config}
        if self._keys.enable_global_rate_limit is not None:
            config.pop("rate_limit", None)
        super().__init__(config, tool_schema)
        keys = self._keys
        self._clients = PerLoop(
            partial(FusionClient, keys.sandbox_fusion_url, memory_limit_mb=keys.memory_limit_mb)
        )

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Give the schema that a YAML need not repeat."""
        return self.tool_schema or _SCHEMA

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Run `parameters["code"]`.

        Raises:
            SandboxError: where the service failed, and not the code.
        """
        execution = await self.run_program(
            str(parameters.get("code", "")),
            timeout_s=parameters.get("timeout"),
            language=parameters.get("language"),
        )
        text = self.describe(execution)
        return ToolResult(ToolResponse(text=text), None, measure(execution))

    async def run_program(self, code: str, *, timeout_s: Any, language: Any) -> Execution:
        """Run a program on the service, for at most `default_timeout` seconds.

        Args:
            code: The program; a fence around it is taken off.
            timeout_s: Seconds; `default_timeout` for what is no positive number.
            language: None or empty: `default_language`.

        Raises:
            SandboxError: if the service failed, and not the code.
        """
        return await self._clients.get().run(
            without_fence(code),
            timeout_s=self._timeout_s(timeout_s),
            language=str(language or self._keys.default_language),
        )

    def describe(self, execution: Execution) -> str:
        """Word a program's output for the policy."""
        return describe_execution(execution)

    async def shutdown(self) -> None:
        """Close the connections."""
        if (client := self._clients.pop()) is not None:
            await client.close()

    def _timeout_s(self, asked: Any) -> float:
        most = self._keys.default_timeout
        is_number = isinstance(asked, int | float) and asked > 0
        return min(float(asked), most) if is_number else most
