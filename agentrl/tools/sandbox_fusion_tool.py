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
from agentrl.tools.base import ToolResult
from agentrl.tools.bundled import BundledTool, function_schema, string_parameter
from agentrl.tools.runtime.settings import SHARED_KEYS
from agentrl.tools.sandbox_tool import describe_execution, execution_metrics


class SandboxFusionToolConfig(Section):
    """The tool's own keys, with verl's names."""

    sandbox_fusion_url: str = Field(min_length=1)
    """The service's address."""
    default_timeout: float = Field(default=30.0, gt=0)
    """Seconds of one program; keep the tool's `timeout_s` above it."""
    default_language: str = "python"
    """A language of the service, for calls that name none."""
    memory_limit_mb: int = Field(default=1024, ge=-1)
    """Megabytes of one program; -1: the service's limit."""
    num_workers: int = Field(default=10, ge=1)
    """Calls at once, over all requests."""
    enable_global_rate_limit: bool | None = None
    """true: `rate_limit` limits the calls that run at once, as in verl; null: calls per second, as
    for every tool."""
    rate_limit: Any = None
    """See `enable_global_rate_limit`."""

    @property
    def max_concurrency(self) -> int:
        """Calls at once: verl's global limit counts running calls, not calls per second."""
        if self.enable_global_rate_limit and self.rate_limit:
            return min(self.num_workers, int(self.rate_limit))
        return self.num_workers


class SandboxFusionTool(BundledTool):
    """Run programs on a service, each by itself; for state across calls use `PythonTool` with
    `sandbox: {provider: sandbox_fusion}`.

    The model sees what the program printed, then its errors, and why it was stopped. A program
    that fails is not a failure of the tool, so the call is `ok`, and its metrics say how it ended
    (see `PythonTool`). A service that fails or cannot be reached is a crash of the tool, which the
    tool's `retry` may repeat.

    Args:
        config: `sandbox_fusion_url` (required); `default_timeout` (seconds of one program, 30.0;
            keep the tool's `timeout_s` above it); `default_language` (`python`); `memory_limit_mb`
            (megabytes, 1024; -1: the service's limit); `num_workers` (calls at once, 10). With
            verl's `enable_global_rate_limit: true`, `rate_limit` limits the calls at once; without
            it, calls per second, as for every tool.
        tool_schema: Shown to the model; None: the bundled schema. Arguments `language` and
            `timeout` are read if it has them; no program gets more than `default_timeout`.
    """

    keys_class = SandboxFusionToolConfig
    default_schema = function_schema(
        "code_interpreter",
        "Run a program and see what it prints. Each call is a program of its own: nothing "
        "stays from one to the next.",
        code=string_parameter("The program."),
    )

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        keys = read_keys(SandboxFusionToolConfig, config, key="config", also_known=SHARED_KEYS)
        shared = {"max_concurrency": keys.max_concurrency, **config}
        if keys.enable_global_rate_limit is not None:
            shared.pop("rate_limit", None)
        super().__init__(shared, tool_schema)
        self._clients = PerLoop(
            partial(FusionClient, keys.sandbox_fusion_url, memory_limit_mb=keys.memory_limit_mb)
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Run `parameters["code"]`.

        Raises:
            SandboxError: if the service failed, and not the code.
        """
        execution = await self.run_program(
            str(parameters.get("code", "")),
            timeout_s=parameters.get("timeout"),
            language=parameters.get("language"),
        )
        response = ToolResponse(text=self.describe(execution))
        return ToolResult(response, None, execution_metrics(execution))

    async def run_program(self, code: str, *, timeout_s: Any, language: Any) -> Execution:
        """Run a program on the service, for at most `default_timeout` seconds.

        Args:
            code: The program; a fence around it is removed.
            timeout_s: Seconds; if it is no positive number, `default_timeout`.
            language: None or empty: `default_language`.

        Raises:
            SandboxError: if the service failed, and not the code.
        """
        limit_s = self._keys.default_timeout
        is_positive = isinstance(timeout_s, int | float) and timeout_s > 0
        return await self._clients.get().run(
            without_fence(code),
            timeout_s=min(float(timeout_s), limit_s) if is_positive else limit_s,
            language=str(language or self._keys.default_language),
        )

    def describe(self, execution: Execution) -> str:
        """Return a program's output as text for the policy."""
        return describe_execution(execution)

    async def shutdown(self) -> None:
        """Close the connections."""
        if (client := self._clients.pop()) is not None:
            await client.close()
