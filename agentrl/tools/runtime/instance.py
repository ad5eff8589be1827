"""One tool, in one request: its life, and the boundary round every call of its code."""

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
    traceback_of,
    words_and_place_of,
)
from agentrl.plugins.keys import read_keys
from agentrl.tools.base import BaseTool, ToolResult, read_reward
from agentrl.tools.runtime.executors import Lane, LoopLane, MethodCall, ThreadLane
from agentrl.tools.runtime.middleware import UnavailableError, Visit, way_of
from agentrl.tools.runtime.settings import ToolSettings
from agentrl.tools.signatures import create_arguments

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ToolKwargs(BaseModel):
    """What a row hands to one tool: keywords for each of its methods."""

    model_config = ConfigDict(extra="forbid")

    create_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    execute_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    calc_reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    release_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_nothing(cls, value: Any) -> Any:
        """Take the nulls with which Parquet fills in what only other rows have."""
        return {} if value is None else value

    @classmethod
    def of(cls, tool: str, kwargs: Mapping[str, Any] | None) -> Self:
        """Check a row's entry for a tool, and copy it: a tool may change what it is given.

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
    """What came of one call: what the model is shown, and what is recorded."""

    call: ToolCall
    outcome: CallOutcome
    response: ToolResponse
    """The tool's answer, or the text that stands in for it."""
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    should_stop: bool = False
    message: str = ""
    """What went wrong, for the record and not for the model; empty where nothing did."""
    traceback: str = ""
    """The end of that of a call that crashed, for whoever wrote the tool."""
    seconds: float = 0.0
    """Of all attempts; time in the queue is not counted."""
    queue_seconds: float = 0.0
    """The rest of the call's time: waited for a place, for an equal call, for another attempt."""
    num_attempts: int = 1
    """Executions; 0 where the tool was not asked."""
    is_cached: bool = False
    """Whether it is the answer of an equal call."""

    @property
    def is_infrastructure_failure(self) -> bool:
        """Whether the tool, not the model, is to blame."""
        return self.outcome in (CallOutcome.TIMEOUT, CallOutcome.CRASHED, CallOutcome.UNAVAILABLE)


class ToolInstance:
    """One tool of one request (plug-in life cycle). Nothing that its code does leaves these methods
    unexpected.

    Args:
        tool: The run's tool.
        instance_id: What `create` is given; its answer may replace it.
        kwargs: What the row hands to it.
        timeout_s: Seconds of one call, where the tool's config has no `timeout_s`.
    """

    def __init__(
        self, tool: BaseTool, *, instance_id: str, kwargs: ToolKwargs, timeout_s: float
    ) -> None:
        settings = ToolSettings.of(type(tool), tool.config, key=f"{tool.name}.config")
        self.tool = tool
        self._kwargs = kwargs
        self._settings = settings
        self._goes_straight = not settings.is_guarded
        self._timeout_s = settings.timeout_s or timeout_s
        self._lane = _lane(tool, settings.isolation)
        self._request_id = self._instance_id = instance_id
        self._must_release = False

    async def create(self) -> ToolResponse:
        """Create the instance, once.

        Raises:
            ToolLifeError: whatever went wrong.
        """
        try:
            await self._lane.open()
            self._must_release = True
            return await self._create()
        except Exception as error:
            raise self._failure("create", error) from error

    async def execute(self, call: ToolCall, *, arrived: float | None = None) -> ToolOutcome:
        """Answer a call of the model. Raises nothing; cancelling it cancels the tool.

        Args:
            call: Checked.
            arrived: When its time in the queue began, by the monotonic clock; None: now.
        """
        arrived = time.monotonic() if arrived is None else arrived
        visit = Visit(call, self._kwargs.execute_kwargs, self._lane.gate, self._attempt)
        way = self._attempt if self._goes_straight else way_of(self.tool, self._settings)
        outcome, message, traceback = CallOutcome.OK, "", ""
        try:
            result = await way(visit)
        except Exception as error:  # noqa: BLE001 - a failed call is data
            outcome, text, message = self._excuse(call, error)
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
            seconds=visit.run_s,
            queue_seconds=max(0.0, time.monotonic() - arrived - visit.run_s),
            num_attempts=visit.num_attempts,
            is_cached=visit.is_cached,
        )

    async def calc_reward(self) -> float | None:
        """Ask for the tool's reward; None if the tool does not judge.

        Raises:
            ToolLifeError: where it raises, hangs, or gives no finite number.
        """
        try:
            await self._revive()
            call = self._call("calc_reward", **self._kwargs.calc_reward_kwargs)
            return await self._run(call, lambda value: read_reward(value, self.tool.name))
        except Exception as error:
            raise self._failure("calc_reward", error) from error

    async def release(self) -> ToolLifeError | None:
        """Release what was created, or whose creation was begun. Called once.

        Returns:
            What went wrong; None where nothing did.
        """
        try:
            if self._must_release:
                await self._release()
        except Exception as error:  # noqa: BLE001 - a failed release ends nothing else
            return self._failure("release", error)
        finally:
            await self._lane.close()
        return None

    @property
    def needs_release(self) -> bool:
        """Whether there is anything to give back, by the tool or by what it runs in."""
        return not (_is_inherited(self.tool, "release") and isinstance(self._lane, LoopLane))

    async def _create(self) -> ToolResponse:
        given = create_arguments(self.tool.create, self._kwargs.create_kwargs)
        call = self._call("create", **given)
        self._instance_id, response = await self._run(call, self._created)
        return response

    def _created(self, value: Any) -> tuple[str, ToolResponse]:
        """Read what `create` returned: an id and a response, or either, or nothing."""
        if value is None or isinstance(value, str):
            return value or self._instance_id, ToolResponse()
        if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 2:
            instance_id, response = cast("tuple[Any, Any]", value)
            return instance_id or self._instance_id, ToolResponse.of(response)
        raise TypeError(
            f"tool {self.tool.name!r}: create returned {value!r:.80}; expected (id, ToolResponse)"
        )

    async def _release(self) -> None:
        await self._run(self._call("release", **self._kwargs.release_kwargs), _forget)

    async def _attempt(self, visit: Visit) -> ToolResult:
        """Execute a call, once."""
        started = time.monotonic()
        visit.num_attempts += 1
        try:
            await self._revive()
            arguments = copy.deepcopy(visit.call.function.arguments)
            call = self._call("execute", arguments, **visit.execute_kwargs)
            return await self._run(call, lambda value: ToolResult.of(value, tool=self.tool.name))
        finally:
            visit.run_s += time.monotonic() - started

    async def _revive(self) -> None:
        """Make the instance again where its process was killed under it."""
        if self._lane.is_lost:
            with suppress(Exception):  # what it would release may have died with the process
                await self._release()
            await self._create()

    def _call(self, method: str, *args: Any, **kwargs: Any) -> MethodCall:
        return MethodCall(method, (self._instance_id, *args), kwargs)

    async def _run(self, call: MethodCall, read: Callable[[Any], T]) -> T:
        """Make a call, and read what it gave back, both inside the boundary."""
        if _is_inherited(self.tool, call.method):
            return read(await call.on(self.tool))

        async def work() -> T:
            return read(await self._lane.run(call))

        return await call_bounded(work, timeout_s=self._timeout_s, name=f"tool:{self.tool.name}")

    def _excuse(self, call: ToolCall, error: Exception) -> tuple[CallOutcome, str, str]:
        """Say what a failed call looks like: to the model neutral, on the record in full."""
        outcome, text = self._describe(error)
        if outcome is CallOutcome.TOOL_ERROR:
            return outcome, text, words_of(error)
        message = words_and_place_of(error)
        self._log(f"call {call.id}: {message}")
        return outcome, text, message

    def _describe(self, error: Exception) -> tuple[CallOutcome, str]:
        """Sort what went wrong, and put it into words for the model."""
        name = self.tool.name
        match error:
            case ToolError():
                return CallOutcome.TOOL_ERROR, text_of(error) or f"Error: tool {name!r} failed"
            case CallTimeoutError():
                text = f"Error: tool {name!r} timed out after {self._timeout_s:g} seconds"
                return CallOutcome.TIMEOUT, text
            case UnavailableError():
                return (
                    CallOutcome.UNAVAILABLE,
                    f"Error: tool {name!r} is not available at the moment",
                )
            case _:
                return CallOutcome.CRASHED, f"Error executing tool {name!r}: internal error"

    def _failure(self, method: str, error: Exception) -> ToolLifeError:
        words = words_and_place_of(error)
        why = f"tool {self.tool.name!r}, {method}: {words}"
        self._log(f"{method}: {words}")
        return ToolLifeError(why, tool=self.tool.name, method=method)

    def _log(self, what: str) -> None:
        """Log a failure with its request.

        The level is info, because a tool may fail thousands of times in a step. The trainer reports
        failures by tool and step (`agentrl.rollout.failures`).
        """
        logger.info("request %s, tool %r, %s", self._request_id, self.tool.name, printable(what))


def _is_inherited(tool: BaseTool, method: str) -> bool:
    """Whether a method is the base class's own, which can neither hang nor harm anybody."""
    return getattr(type(tool), method) is getattr(BaseTool, method) and method not in vars(tool)


def _lane(tool: BaseTool, isolation: ExecutionMode) -> Lane:
    if isolation is ExecutionMode.PROCESS:
        # Starting processes is for those who ask for it: nobody else pays for the import.
        from agentrl.tools.runtime.process import ProcessLane

        return ProcessLane(tool)
    return ThreadLane(tool) if isolation is ExecutionMode.THREAD else LoopLane(tool)


def _forget(_: Any) -> None:
    """Take what `release` returned for nothing."""
