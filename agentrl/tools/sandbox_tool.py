"""Run code of the model in the sandbox: the base class of such tools, and the text of a result."""

import uuid
from typing import Any

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.sandbox import Execution, ExecutionEnd, Sandbox, Session
from agentrl.sandbox.factory import SharedSandbox, check_sandbox, warn_of_unused_keys
from agentrl.tools.base import ToolResult
from agentrl.tools.bundled import BundledTool
from agentrl.tools.runtime.settings import ToolSettings

NOTHING = "(no output)"

_LOSES_STATE = {ExecutionEnd.TIMEOUT, ExecutionEnd.CPU, ExecutionEnd.KILLED}
"""Ends after which the sandbox starts again. Code that needs too much memory gets an error only."""


class SandboxToolConfig(Section):
    """The own keys of a tool that runs code in the sandbox."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where the code runs, and what it may use: a mapping of `SandboxConfig`'s keys."""


class SandboxTool(BundledTool):
    """Run code of the model in a session of the sandbox, one session for each request.

    Subclasses open the session (`open_session`) and read the arguments (`execute`).

    Args:
        config: See the subclass. The sandbox provider is checked here, so that a run without one
            ends before it begins.
        tool_schema: Shown to the model.

    Raises:
        ConfigError: for an invalid key, or a `timeout_s` that is not above the sandbox's.
        SandboxError: if this machine has no sandbox provider, with what to install.
    """

    keys_class = SandboxToolConfig
    why_inline = "the code runs in processes of its own anyway"
    lost_text = ""
    """Shown to the model if its code was stopped: which state is lost."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        sandbox = self.sandbox_config
        call_s, code_s = ToolSettings.check(config).timeout_s, sandbox.timeout_s
        # Else the call would end first: an endless loop would count as a failure of the tool, and
        # end the session.
        if call_s is not None and call_s <= code_s:
            raise ConfigError(
                f"timeout_s is {call_s:g}, and the sandbox gives the code {code_s:g} seconds",
                key="config.timeout_s",
                expected=f"more than config.sandbox.timeout_s, which is {code_s:g}",
            )
        check_sandbox(sandbox, key="config.sandbox")
        warn_of_unused_keys(sandbox, key=f"{self.name}: config.sandbox")
        self._shared = SharedSandbox(sandbox)
        self._sessions: dict[str, Session] = {}

    @property
    def sandbox_config(self) -> SandboxConfig:
        """The keys of the sandbox in which this tool runs code."""
        return self._keys.sandbox

    async def open_session(self, sandbox: Sandbox) -> Session:
        """Open the session in which one request runs its code."""
        raise NotImplementedError

    async def create(
        self, instance_id: str | None = None, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Open the session of one request. Its process starts with the first call."""
        instance_id = instance_id or uuid.uuid4().hex
        self._sessions[instance_id] = await self.open_session(self._shared.get())
        return instance_id, ToolResponse()

    async def run(self, instance_id: str, source: str, **options: Any) -> ToolResult:
        """Run code of the model, and return what it is shown.

        Raises:
            SandboxError: if the sandbox failed, and not the code.
        """
        execution: Execution = await self._sessions[instance_id].run(source, **options)
        text = describe_execution(execution, lost=self.lost_text)
        return ToolResult(ToolResponse(text=text), None, execution_metrics(execution))

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """End the session, with its names and files."""
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            await session.close()

    async def shutdown(self) -> None:
        """End the sandbox."""
        await self._shared.close()


def describe_execution(execution: Execution, *, lost: str = "") -> str:
    """Return an execution as text: its output, then its errors, which say why it was stopped.

    Args:
        execution: The finished execution.
        lost: Added if the execution was stopped: what is lost.
    """
    parts = [execution.stdout.strip("\n"), execution.stderr.strip("\n")]
    if execution.num_cut_bytes:
        parts.append(f"[{execution.num_cut_bytes} more bytes of output were thrown away]")
    if execution.end in _LOSES_STATE:
        parts.append(lost)
    elif execution.exit_code:
        parts.append(f"[exit code {execution.exit_code}]")
    return "\n".join(part for part in parts if part) or NOTHING


def execution_metrics(execution: Execution) -> dict[str, Any]:
    """Return what the call's record keeps of an execution."""
    return {
        "end": execution.end.value,
        "seconds": execution.seconds,
        "num_cut_bytes": execution.num_cut_bytes,
    }
