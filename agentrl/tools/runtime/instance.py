"""One tool in one request: its life cycle, and the boundary around every call of its code."""

import copy
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentrl.errors import (
    ConfigError,
    DataError,
    ToolError,
    ToolLifeError,
    printable,
    text_of,
    words_of,
)
from agentrl.messages import CallOutcome, ToolCall, ToolResponse
from agentrl.plugins.call import (
    CallTimeoutError,
    ExecutionMode,
    call_bounded,
    describe_error,
    traceback_of,
)
from agentrl.plugins.keys import read_keys
from agentrl.tools.base import BaseTool, ToolResult, read_reward
from agentrl.tools.runtime.executors import InstanceLostError, MethodCall, make_executor
from agentrl.tools.runtime.middleware import CallContext, UnavailableError, handler_of
from agentrl.tools.runtime.settings import ToolSettings
from agentrl.tools.signatures import create_arguments, named_arguments

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ToolKwargs(BaseModel):
    """The keywords that a row gives to each method of one tool."""

    model_config = ConfigDict(extra="forbid")

    create_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    execute_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    calc_reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    release_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])

    @field_validator("*", mode="before")
    @classmethod
    def _read_null_as_empty(cls, value: Any) -> Any:
        """Accept null: Parquet fills in null for keys that only other rows have."""
        return {} if value is None else value

    @classmethod
    def of(cls, tool: str, kwargs: Mapping[str, Any] | None) -> Self:
        """Check and copy a row's entry for a tool; the copy is the tool's to change.

        Raises:
            DataError: for an unknown key, with the nearest known one.
        """
        if not kwargs:
            return cls()
        try:
            given = copy.deepcopy(dict(kwargs))
            return read_keys(cls, given, key=f"extra_info.tools_kwargs.{tool}")
        except ConfigError as error:
            raise DataError(str(error.args[0]), **error.details) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """The result of one call: what the model is shown, and what is recorded."""

    call: ToolCall
    outcome: CallOutcome
    response: ToolResponse
    """The tool's answer; if the call failed, a text in its place."""
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    should_stop: bool = False
    message: str = ""
    """The error, for the record and not for the model; empty if the call did not fail."""
    traceback: str = ""
    """The end of the traceback, if the call crashed; for the author of the tool."""
    seconds: float = 0.0
    """Seconds of all attempts, without the time in queues."""
    queue_seconds: float = 0.0
    """The rest of the call's time: in queues, waiting for an equal call, between attempts, and
    waiting for the event loop before the work starts and after it ends."""
    arrived: float | None = None
    """When the call began to queue, by the monotonic clock."""
    num_attempts: int = 1
    """Executions; 0 if the tool was not called."""
    is_cached: bool = False
    """Whether it is the answer of an equal call."""

    @property
    def is_infrastructure_failure(self) -> bool:
        """Whether the tool failed, and not the model."""
        return self.outcome in (CallOutcome.TIMEOUT, CallOutcome.CRASHED, CallOutcome.UNAVAILABLE)


class ToolInstance:
    """One tool of one request. Errors of its code leave these methods only as documented.

    Args:
        tool: The run's tool.
        instance_id: Given to `create`, which may return another.
        kwargs: The row's keywords for its methods.
        timeout_s: Seconds of one call, if the tool's config has no `timeout_s`.
        offered: Arguments for a `create` that has a parameter of that name (see `ToolSession`).
    """

    def __init__(
        self,
        tool: BaseTool,
        *,
        instance_id: str,
        kwargs: ToolKwargs,
        timeout_s: float,
        offered: Mapping[str, Any] | None = None,
    ) -> None:
        settings = ToolSettings.of(type(tool), tool.config, key=f"{tool.name}.config")
        self.tool = tool
        self._kwargs = kwargs
        self._settings = settings
        self._timeout_s = settings.timeout_s or timeout_s
        is_here = settings.isolation is ExecutionMode.INLINE and tool.remote_object is None
        self._offered = offered if is_here else None
        self._executor = make_executor(tool, settings.isolation, timeout_s=self._timeout_s)
        self._request_id = self._instance_id = instance_id
        self._must_release = False

    async def create(self) -> ToolResponse:
        """Create the instance, once.

        Raises:
            ToolLifeError: for every error.
        """
        try:
            await self._executor.open()
            self._must_release = True
            return await self._create()
        except Exception as error:
            raise self._failure("create", error) from error

    async def execute(self, call: ToolCall, *, arrived: float | None = None) -> ToolOutcome:
        """Answer a call of the model. Raises nothing; cancelling it cancels the tool.

        Args:
            call: A checked call.
            arrived: When the call began to queue, by the monotonic clock; None: now.
        """
        arrived = time.monotonic() if arrived is None else arrived
        lock, kwargs = self._executor.request_lock, self._kwargs.execute_kwargs
        context = CallContext(call, kwargs, lock, self._attempt)
        settings = self._settings
        handler = handler_of(self.tool, settings) if settings.has_middleware else self._attempt
        outcome, message, traceback = CallOutcome.OK, "", ""
        try:
            result = await handler(context)
        except Exception as error:  # noqa: BLE001 - a failed call is data
            outcome, text = self._describe(error)
            if outcome is CallOutcome.TOOL_ERROR:
                message = words_of(error)
            else:
                message = describe_error(error)
                self._log(f"call {call.id}: {message}")
            traceback = traceback_of(error) if outcome is CallOutcome.CRASHED else ""
            result = ToolResult(ToolResponse(text=text))
        return ToolOutcome(
            call=call,
            outcome=outcome,
            response=result.response,
            reward=result.reward,
            metrics=result.metrics or {},
            should_stop=result.should_stop,
            message=message,
            traceback=traceback,
            seconds=context.run_s,
            queue_seconds=max(0.0, time.monotonic() - arrived - context.run_s),
            arrived=arrived,
            num_attempts=context.num_attempts,
            is_cached=context.is_cached,
        )

    async def calc_reward(self) -> float | None:
        """Return the tool's reward; None if the tool gives none.

        Raises:
            ToolLifeError: if it raises, times out, or returns no finite number.
        """
        try:
            return await self._run_created(
                lambda: self._call("calc_reward", **self._kwargs.calc_reward_kwargs),
                lambda value: read_reward(value, self.tool.name),
            )
        except Exception as error:
            raise self._failure("calc_reward", error) from error

    async def release(self) -> ToolLifeError | None:
        """Release the instance, if its creation was started. Called once.

        Returns:
            The error, for the record; None if there was none.
        """
        try:
            if self._must_release:
                await self._release()
        except Exception as error:  # noqa: BLE001 - a failed release does not fail the request
            return self._failure("release", error)
        finally:
            await self._executor.close()
        return None

    @property
    def needs_release(self) -> bool:
        """Whether the tool, or the process that it runs in, has anything to give back."""
        in_process = self._settings.isolation is ExecutionMode.PROCESS
        return (
            in_process
            or self.tool.remote_object is not None
            or not _is_inherited(self.tool, "release")
        )

    async def _create(self) -> ToolResponse:
        given = create_arguments(self.tool.create, self._kwargs.create_kwargs)
        given |= named_arguments(self.tool.create, self._offered or {})
        call = self._call("create", **given)
        self._instance_id, response = await self._run(call, self._read_created)
        return response

    def _read_created(self, value: Any) -> tuple[str, ToolResponse]:
        """Read what `create` returned: an id and a response, an id alone, or None."""
        if value is None or isinstance(value, str):
            return value or self._instance_id, ToolResponse()
        if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 2:
            instance_id, response = cast("tuple[Any, Any]", value)
            return instance_id or self._instance_id, ToolResponse.of(response)
        raise TypeError(
            f"tool {self.tool.name!r}: create returned {value!r:.80}; expected (id, ToolResponse)"
        )

    async def _release(self) -> None:
        await self._run(self._call("release", **self._kwargs.release_kwargs), lambda _: None)

    async def _attempt(self, context: CallContext) -> ToolResult:
        """Execute a call, once."""
        times = list[float]()  # other requests may occupy the event loop before and after the work
        context.num_attempts += 1
        try:
            arguments = copy.deepcopy(context.call.function.arguments)
            return await self._run_created(
                lambda: self._call("execute", arguments, **context.execute_kwargs),
                lambda value: ToolResult.of(value, tool=self.tool.name, made_by=type(self.tool)),
                times,
            )
        finally:
            ends = [*times[1::2], time.monotonic()]  # a call that was given up has no end yet
            context.run_s += sum(end - start for start, end in zip(times[::2], ends, strict=False))

    async def _recreate_if_lost(self) -> None:
        """Create the instance again, if its process was killed."""
        if self._executor.is_lost:
            await self._executor.open()
            with suppress(Exception):  # what it would release may have ended with the process
                await self._release()
            await self._create()

    async def _run_created(
        self,
        call: Callable[[], MethodCall],
        read: Callable[[Any], T],
        times: list[float] | None = None,
    ) -> T:
        """Make a call of the instance, which is created again if its process was lost."""
        await self._recreate_if_lost()
        try:
            return await self._run(call(), read, times)
        except InstanceLostError:  # the call did not run
            await self._recreate_if_lost()
            return await self._run(call(), read, times)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> MethodCall:
        return MethodCall(method, (self._instance_id, *args), kwargs)

    async def _run(
        self, call: MethodCall, read: Callable[[Any], T], times: list[float] | None = None
    ) -> T:
        """Make a call and read its result, both inside the boundary.

        Args:
            call: The call.
            read: Reads what it returned.
            times: Gets the monotonic times at which the work starts and ends.
        """
        if _is_inherited(self.tool, call.method):
            return read(await call.on(self.tool))
        times = [] if times is None else times

        async def work() -> T:
            times.append(time.monotonic())
            try:
                return read(await self._executor.run(call))
            finally:
                times.append(time.monotonic())

        return await call_bounded(work, timeout_s=self._timeout_s, name=f"tool:{self.tool.name}")

    def _describe(self, error: Exception) -> tuple[CallOutcome, str]:
        """Return the outcome of a failed call, and the text for the model."""
        name = self.tool.name
        match error:
            case ToolError():
                return CallOutcome.TOOL_ERROR, text_of(error) or f"Error: tool {name!r} failed"
            case CallTimeoutError():
                text = f"Error: tool {name!r} timed out after {self._timeout_s:g} seconds"
                return CallOutcome.TIMEOUT, text
            case UnavailableError():
                text = f"Error: tool {name!r} is not available at the moment"
                return CallOutcome.UNAVAILABLE, text
            case _:
                return CallOutcome.CRASHED, f"Error executing tool {name!r}: internal error"

    def _failure(self, method: str, error: Exception) -> ToolLifeError:
        message = describe_error(error)
        self._log(f"{method}: {message}")
        name = self.tool.name
        return ToolLifeError(f"tool {name!r}, {method}: {message}", tool=name, method=method)

    def _log(self, message: str) -> None:
        """Log a failure with its request.

        The level is info, because a tool may fail thousands of times in a step. The trainer reports
        failures by tool and step.
        """
        logger.info("request %s, tool %r, %s", self._request_id, self.tool.name, printable(message))


def _is_inherited(tool: BaseTool, method: str) -> bool:
    """Whether a method is that of `BaseTool`, which can neither hang nor fail."""
    return getattr(type(tool), method) is getattr(BaseTool, method) and method not in vars(tool)
