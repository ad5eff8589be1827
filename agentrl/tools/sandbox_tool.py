"""What the tools share that run code in the sandbox: one session for each request."""

import uuid
from typing import Any, Generic, TypeVar

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.plugins.keys import read_keys
from agentrl.sandbox import Execution, ExecutionEnd, Sandbox, Session
from agentrl.sandbox.factory import SharedSandbox, check_sandbox, warn_of_unused_keys
from agentrl.tools.base import BaseTool, ToolResult
from agentrl.tools.runtime.settings import SHARED_KEYS, ToolSettings, refuse_isolation


class SandboxToolConfig(Section):
    """The keys of such a tool's own."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where the code runs, and what it may use: a mapping of `SandboxConfig`'s keys."""


Keys = TypeVar("Keys", bound=SandboxToolConfig)


class SandboxTool(BaseTool, Generic[Keys]):
    """Runs what the model writes in a session of the sandbox, one for each request.

    Subclasses name their keys (`keys_class`), say which session (`open_session`) and read the
    arguments (`execute`).

    Args:
        config: See the subclass. The provider is looked for here, so that a run without one ends
            before it begins.
        tool_schema: What the model is told.

    Raises:
        ConfigError: for a wrong key, or a `timeout_s` that is not above the sandbox's.
        SandboxError: where no sandbox can be had on this machine, with what to install.
    """

    keys_class: type[Keys]
    lost_text = ""
    """What the model is told is gone where its code was stopped."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        refuse_isolation(config, because="the code runs in processes of its own anyway")
        self._keys = read_keys(self.keys_class, config, key="config", also_known=SHARED_KEYS)
        _check_times(ToolSettings.check(config).timeout_s, self._keys.sandbox.timeout_s)
        check_sandbox(self._keys.sandbox, key="config.sandbox")
        warn_of_unused_keys(self._keys.sandbox, key=f"{self.name}: config.sandbox")
        self._shared = SharedSandbox(self._keys.sandbox)
        self._sessions: dict[str, Session] = {}

    @property
    def sandbox_config(self) -> SandboxConfig:
        """The keys of the sandbox in which this runs code."""
        return self._keys.sandbox

    async def open_session(self, sandbox: Sandbox) -> Session:
        """Open what one request runs its code in."""
        raise NotImplementedError

    async def create(
        self, instance_id: str | None = None, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Open the session of one request; nothing starts before the first call."""
        instance_id = instance_id or uuid.uuid4().hex
        self._sessions[instance_id] = await self.open_session(self._shared.get())
        return instance_id, ToolResponse()

    async def run(self, instance_id: str, source: str, **options: Any) -> ToolResult:
        """Run what the model wrote, and show it what came of it.

        Raises:
            SandboxError: where the sandbox failed, and not the code.
        """
        execution: Execution = await self._sessions[instance_id].run(source, **options)
        text = describe_execution(execution, lost=self.lost_text)
        return ToolResult(ToolResponse(text=text), None, measure(execution))

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """End the session, with its names and files."""
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            await session.close()

    async def shutdown(self) -> None:
        """End the sandbox."""
        await self._shared.close()


def _check_times(call_s: float | None, code_s: float) -> None:
    """Refuse a tool that is given up on before the sandbox stops what is late.

    An endless loop would count as a failure of the tool, and take the session with it.
    """
    if call_s is not None and call_s <= code_s:
        raise ConfigError(
            f"timeout_s is {call_s:g}, and the sandbox gives the code {code_s:g} seconds",
            key="config.timeout_s",
            expected=f"more than config.sandbox.timeout_s, which is {code_s:g}",
        )


NOTHING = "(no output)"

_ENDS_STATE = {ExecutionEnd.TIMEOUT, ExecutionEnd.CPU, ExecutionEnd.KILLED}
"""Ends behind which the sandbox begins anew; what needed too much memory was only refused it."""


def describe_execution(execution: Execution, *, lost: str = "") -> str:
    """Show an execution: its output, and behind it its errors, which say what stopped it.

    Args:
        execution: What came of it.
        lost: What is gone where it was stopped, in words.
    """
    parts = [execution.stdout.strip("\n"), execution.stderr.strip("\n")]
    if execution.num_cut_bytes:
        parts.append(f"[{execution.num_cut_bytes} more bytes of output were thrown away]")
    if execution.end in _ENDS_STATE:
        parts.append(lost)
    elif execution.exit_code:
        parts.append(f"[exit code {execution.exit_code}]")
    return "\n".join(part for part in parts if part) or NOTHING


def measure(execution: Execution) -> dict[str, Any]:
    """Give what a call's record keeps of an execution."""
    return {
        "end": execution.end.value,
        "seconds": execution.seconds,
        "num_cut_bytes": execution.num_cut_bytes,
    }
