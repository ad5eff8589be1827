"""Run a tool where its `resources` are: `RemoteExecutor` sends each call to a `HostedTool`.

The tool itself has the same executor there as it would have here (`config.isolation`). If its
process dies, the calls in it fail. It is started again, and each instance is created again before
its next call, as for a tool in a process.
"""

import asyncio
import pickle
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from agentrl.errors import ToolLifeError, WorkerLostError
from agentrl.plugins.call import (
    MAX_GRACE_S,
    SET_UP_S,
    CallTimeoutError,
    ExecutionMode,
    call_bounded,
    setting_up,
    shut_down,
)
from agentrl.plugins.remote import RemoteObject
from agentrl.tools.base import BaseTool
from agentrl.tools.registry import initialize_tools_from_config
from agentrl.tools.runtime.executors import (
    InstanceLostError,
    MethodCall,
    ToolExecutor,
    make_executor,
)
from agentrl.tools.runtime.process import sendable
from agentrl.tools.runtime.settings import ToolSettings


class RemoteExecutor(ToolExecutor):
    """Run the methods of one tool for one request in the process of a `HostedTool`.

    Args:
        tool: The tool.
        remote: Its `HostedTool`.
        mode: Where the tool runs in that process.
        timeout_s: Seconds of one call.
    """

    def __init__(
        self, tool: BaseTool, remote: RemoteObject, mode: ExecutionMode, timeout_s: float
    ) -> None:
        super().__init__(tool)
        self._remote, self._timeout_s = remote, timeout_s
        self._in_process = mode is ExecutionMode.PROCESS
        if self._in_process:
            self.request_lock = asyncio.Lock()
        self._key = uuid.uuid4().hex
        self._is_known = False
        """Whether the hosted tool has heard of this instance."""
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the instance ended with its process since the last `create`."""
        return self._is_lost

    async def open(self) -> None:
        """Wait until the process of the tool is ready.

        Raises:
            ToolLifeError: if it is not, in time.
        """
        try:
            await self._remote.wait_until_ready()
        except WorkerLostError as error:
            raise ToolLifeError(f"the process of tool {self.tool.name!r}: {error}") from None

    async def run(self, call: MethodCall) -> Any:
        """Make the call there.

        Raises:
            InstanceLostError: if the process was replaced before the call, which did not run.
            ToolError: if the tool raised one.
            ToolLifeError: if the tool raised another error, or the process died.
            CallTimeoutError: if the time was up there first.
        """
        if call.method == "create":
            self._is_lost = False
        is_known, self._is_known, pickled = self._is_known, True, pickle.dumps(call)
        try:
            with setting_up(self._timeout_s + SET_UP_S):  # the process limits the call
                answer = await self._while_alive(
                    self._remote.call("run", self._key, is_known, self._timeout_s, pickled)
                )
        except WorkerLostError as error:
            self._lose()
            raise ToolLifeError(
                f"the process of tool {self.tool.name!r} died in {call.method}", reason=str(error)
            ) from None
        except asyncio.CancelledError:
            self._is_lost = self._in_process
            raise
        value, error, is_lost = pickle.loads(answer)
        self._is_lost = self._is_lost or is_lost
        if isinstance(error, InstanceLostError):
            self._lose()
        if error is not None:
            raise error
        return value

    async def _while_alive(self, call: Coroutine[Any, Any, bytes]) -> bytes:
        """Await an answer as long as the process is not blocked, which is asked from time to time.

        Raises:
            CallTimeoutError: if the process does not answer.
        """
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({answer}, timeout=self._timeout_s))[0]:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._remote.call("respond")
                except TimeoutError:
                    message = f"its process is blocked: no answer within {self._timeout_s:g} s"
                    raise CallTimeoutError(message) from None
            return await answer
        finally:
            if not answer.done():
                answer.cancel()
                await asyncio.wait({answer}, timeout=MAX_GRACE_S)

    async def close(self) -> None:
        """End the instance there."""
        if self._is_known:
            self._is_known = False
            with suppress(WorkerLostError):
                await self._remote.call("end", self._key)

    def _lose(self) -> None:
        self._is_lost, self._is_known = True, False


def host_tool(path: str, name: str) -> "HostedTool":
    """Build a tool of a YAML in the process in which its calls run.

    Raises:
        ConfigError: as `initialize_tools_from_config`.
    """
    [tool] = [tool for tool in initialize_tools_from_config(path) if tool.name == name]
    return HostedTool(tool)


class HostedTool:
    """A tool in the process that has its resources; one executor for each instance.

    Instances of a rank or worker that died stay until the run ends.

    Args:
        tool: The tool.
    """

    def __init__(self, tool: BaseTool) -> None:
        self._tool = tool
        settings = ToolSettings.of(type(self._tool), self._tool.config)
        self._mode = settings.isolation
        self._executors: dict[str, ToolExecutor] = {}

    async def run(self, key: str, is_known: bool, timeout_s: float, packed_call: bytes) -> bytes:
        """Make a call of an instance.

        Args:
            key: Names the instance.
            is_known: Whether the caller made a call of this instance before.
            timeout_s: Seconds of the call.
            packed_call: A `MethodCall`.

        Returns:
            The value, the error or None, and whether the instance was lost; pickled.
        """
        executor = self._executors.get(key)
        if executor is None and is_known:
            error = InstanceLostError(f"the process of tool {self._tool.name!r} was replaced")
            return pickle.dumps((None, error, True))
        if executor is None:
            executor = self._executors[key] = make_executor(
                self._tool, self._mode, timeout_s=timeout_s
            )
        value, error = None, None
        try:
            await executor.open()
            call = partial(executor.run, pickle.loads(packed_call))
            name = f"tool:{self._tool.name}"
            value = await call_bounded(call, timeout_s=timeout_s, name=name)
        except Exception as raised:  # noqa: BLE001 - the boundary around code of users
            error = raised if isinstance(raised, CallTimeoutError) else sendable(raised)
        try:
            return pickle.dumps((value, error, executor.is_lost))
        except Exception as failure:  # noqa: BLE001 - pickling runs code of users
            return pickle.dumps((None, sendable(failure), executor.is_lost))

    async def respond(self) -> None:
        """Do nothing: the answer shows that no code blocks this process."""

    async def end(self, key: str) -> None:
        """End an instance."""
        if executor := self._executors.pop(key, None):
            await executor.close()

    def load(self) -> dict[str, int]:
        """Return figures for the heartbeats of the process."""
        return {"instances": len(self._executors)}

    async def close(self) -> None:
        """End all instances and shut the tool down, at the end of the run."""
        for key in list(self._executors):
            await self.end(key)
        await shut_down([self._tool])
