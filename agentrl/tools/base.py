"""What a tool is: the class that users subclass, and what its `execute` gives back."""

import math
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse


class ToolResult(NamedTuple):
    """What one execution of a tool gives back.

    Example:
        >>> ToolResult.of(("42", 0.5), tool="calculator").reward
        0.5
    """

    response: ToolResponse
    """What the model is shown."""
    reward: float | None = None
    """Reward of this call; None where the tool does not judge it."""
    metrics: dict[str, Any] | None = None
    """What the tool reports of itself; stands in the call's record."""
    should_stop: bool = False
    """End the request: the model is not asked again."""

    @classmethod
    def of(cls, value: Any, *, tool: str) -> "ToolResult":
        """Accept whatever users return, and check it.

        Args:
            value: A `ToolResult`, a `ToolResponse`, a string, a dict (shown as JSON), or a tuple
                `(response,)`, `(response, reward)`, `(response, reward, metrics)`.
            tool: Name of the tool, for the error.

        Raises:
            TypeError: for None and everything else, naming the tool.
            ValueError: for a reward that is not finite.
        """
        fields: tuple[Any, ...] = cast("tuple[Any, ...]", value)
        if not isinstance(value, tuple):
            fields = (value,)
        elif not isinstance(value, cls) and not 1 <= len(fields) <= 3:
            raise TypeError(
                f"tool {tool!r} returned a tuple of {len(fields)}; expected (response,), "
                "(response, reward), (response, reward, metrics) or a ToolResult"
            )
        result = cls(*fields)
        return cls(
            _response(result.response, tool),
            None if result.reward is None else finite(result.reward, tool),
            _metrics(result.metrics, tool),
            bool(result.should_stop),
        )


class BaseTool:
    """A tool that a model can call. Subclass it and name the subclass in a tool YAML.

    One object is built per run and serves every request; what belongs to one request is kept under
    its `instance_id`. The life of an instance, for each request:

    1. `create` once, before the first turn;
    2. `execute` for each call of the model, several at once where one turn holds several calls;
    3. `calc_reward` once, at the end, unless the request failed;
    4. `release` once, always: after a failure, a time-out or a cancellation too, even of `create`.

    Methods may be `async def`, or plain `def`, which then runs on a thread. Each call has a
    time-out (`rollout.multi_turn.tool_timeout_s`, or `timeout_s` in the tool's `config`). A call
    that is late, or whose request is cancelled, is cancelled: that raises
    `asyncio.CancelledError` inside it; clean up and let it through.

    `config.isolation` says where the methods run. `none`: on the event loop, where blocking code
    holds up every request. `thread`: each call in an event loop of its own on a thread, which may
    block; asyncio objects cannot be carried from one call to the next. `process`: one process per
    request and tool, its calls one after another, killed on time-out; the tool is then built
    again in a new process, where `release` and `create` run before the next call. Only there can
    code that never returns be stopped.

    These keys of `config` are agentrl's, for whatever class; the rest is the tool's own
    (docs/tools.md has every sub-key):

        isolation: none          none, thread or process
        timeout_s: null          seconds of one call and of each attempt; null: the run's
        retry: null              attempts and pauses of a call that crashed or was late
        max_concurrency: null    calls of `execute` that run at once, over all requests
        rate_limit: null         calls of `execute` per second, over all requests
        cache: null              declares that equal calls have equal answers
        circuit_breaker: null    fails calls at once after too many failures in a row

    Args:
        config: The YAML's `config`, whole.
        tool_schema: What the model is told; None asks `get_openai_tool_schema`.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config = config
        self.tool_schema = cast("OpenAIFunctionToolSchema", tool_schema)
        self.tool_schema = tool_schema or self.get_openai_tool_schema()

    @property
    def name(self) -> str:
        """The name by which the model calls the tool: that of its schema."""
        return vars(self).get("_name") or self.tool_schema.name

    @name.setter
    def name(self, name: str) -> None:
        # Constructors written for verl set it; the loader checks that the schema has the same.
        self._name = name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Give the schema; override it where the YAML need not write one.

        Raises:
            ConfigError: where there is neither a schema nor an override.
        """
        # An override of users may call this one before a schema was set.
        schema = cast("OpenAIFunctionToolSchema | None", self.tool_schema)
        if schema is None:
            raise ConfigError(
                f"{type(self).__name__} has no schema",
                expected="tool_schema in the YAML, or a class with get_openai_tool_schema",
            )
        return schema

    async def create(
        self, instance_id: str | None = None, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Make what one request needs. Called once per request, before its first turn.

        Args:
            instance_id: The request's id.
            **create_kwargs: The row's `tools_kwargs[name].create_kwargs`.

        Returns:
            The id under which the instance is kept, and a response; one that is not empty is
            appended to the conversation before the first turn. The id alone will do.

        Raises:
            Exception: Any fails this request, and no other, with `Fault.TOOL`.
        """
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult | tuple[Any, ...] | ToolResponse | str | dict[str, Any]:
        """Answer one call of the model.

        Args:
            instance_id: From `create`.
            parameters: The call's arguments, checked against the schema.
            **execute_kwargs: The row's `tools_kwargs[name].execute_kwargs`.

        Returns:
            What `ToolResult.of` takes.

        Raises:
            ToolError: Its text is shown to the model, which may try again.
            Exception: The call is repeated where `config.retry` says so; at the last attempt the
                model is shown a neutral text, and the call is counted as crashed; the request goes
                on, or fails under `on_tool_failure: fail`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(
        self, instance_id: str, **calc_reward_kwargs: Any
    ) -> float | list[Any] | None:
        """Judge what was done with the tool. Called once, at the end of a request.

        Returns:
            A number. A list or None is no reward: the tool does not judge.

        Raises:
            Exception: Any (and a number that is not finite) fails this request with `Fault.TOOL`.
        """
        return 0.0

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Give back what `create` took. Called once per `create` that was begun, always.

        After a time-out of a process-isolated tool it runs in a new process that never saw
        `create`: release what is outside, and let what is missing be missing.

        Raises:
            Exception: Recorded, and nothing more.
        """

    async def shutdown(self) -> None:
        """Give back what the whole run shares: connections, pools. Called once, when a run ends.

        Raises:
            Exception: Logged, and nothing more.
        """

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as what it was built from."""
        return type(self), (self.config, self.tool_schema)


def finite(value: Any, tool: str) -> float:
    """Check a reward of `tool`.

    Raises:
        TypeError: for what is no number.
        ValueError: for NaN and infinities.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"tool {tool!r} gave {value!r:.80} as its reward, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"tool {tool!r} gave {number} as its reward, not a finite number")
    return number


def read_reward(value: Any, tool: str) -> float | None:
    """Read what `calc_reward` returned; None if that is no judgment.

    Tools written for verl return the list of their results, which verl stores and never reads.

    Raises:
        TypeError: for anything else that is no number.
        ValueError: for NaN and infinities.
    """
    return None if value is None or isinstance(value, list) else finite(value, tool)


def _response(value: Any, tool: str) -> ToolResponse:
    if isinstance(value, ToolResponse | str | dict):
        return ToolResponse.of(cast("ToolResponse | str | dict[str, Any]", value))
    raise TypeError(
        f"tool {tool!r} returned {value!r:.80}; expected a ToolResult, ToolResponse, str or dict"
    )


def _metrics(value: Any, tool: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        metrics = dict(cast("Mapping[Any, Any]", value))
        if all(isinstance(name, str) for name in metrics):
            return metrics
    raise TypeError(
        f"tool {tool!r} returned {value!r:.80} as its metrics; expected a dict by names"
    )
