"""The base class of tools, and the result of an execution."""

import inspect
import math
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.plugins.remote import RemoteObject

T = TypeVar("T", bound="BaseTool")


class ToolResult(NamedTuple):
    """The result of one execution of a tool.

    Example:
        >>> ToolResult.of(("42", 0.5), tool="calculator").reward
        0.5
    """

    response: ToolResponse
    """Shown to the model."""
    reward: float | None = None
    """Reward of this call; None if the tool gives none."""
    metrics: dict[str, Any] | None = None
    """Values of the tool for the call's record."""
    should_stop: bool = False
    """End the request: no further turn is sampled."""

    @classmethod
    def of(cls, value: Any, *, tool: str, made_by: Any = None) -> "ToolResult":
        """Check a value that users return, and convert it.

        Args:
            value: A `ToolResult`, a `ToolResponse`, a string, a dict (shown as JSON), or a tuple
                `(response,)`, `(response, reward)`, `(response, reward, metrics)`.
            tool: Name of the tool, for the error.
            made_by: The class or function that returned the value, for the error.

        Raises:
            TypeError: for any other value, also None; it names the tool.
            ValueError: if the reward is not finite.
        """
        fields: tuple[Any, ...] = cast("tuple[Any, ...]", value)
        if not isinstance(value, tuple):
            fields = (value,)
        elif not isinstance(value, cls) and not 1 <= len(fields) <= 3:
            raise TypeError(
                f"tool {tool!r}{_location(made_by)} returned a tuple of {len(fields)}; expected "
                "(response,), (response, reward), (response, reward, metrics) or a ToolResult"
            )
        result = cls(*fields)
        response = cast("Any", result.response)
        if not isinstance(response, ToolResponse | str | dict):
            raise TypeError(
                f"tool {tool!r}{_location(made_by)} returned {response!r:.80}; expected a "
                "ToolResult, ToolResponse, str, dict or tuple (response, reward, metrics)"
            )
        return cls(
            ToolResponse.of(cast("ToolResponse | str | dict[str, Any]", response)),
            None if result.reward is None else finite(result.reward, tool),
            _metrics(result.metrics, tool),
            bool(result.should_stop),
        )


def _location(made_by: Any) -> str:
    """Name a class or function of a tool and its file; empty if they are unknown."""
    with suppress(TypeError, OSError):
        if (file := inspect.getsourcefile(made_by)) is not None:
            return f" ({made_by.__name__} in {Path(file).name})"
    return ""


CONSTRUCTOR = "def __init__(self, config, tool_schema) that calls super().__init__(...)"


class BaseTool:
    """A tool that a model can call. Subclass it and name the subclass in a tool YAML.

    One object is built per run and serves every request; keep the state of a request under its
    `instance_id`. The life cycle of an instance, for each request:

    1. `create` once, before the first turn;
    2. `execute` for each call of the model, several at once if one turn has several calls;
    3. `calc_reward` once, at the end, unless the request failed;
    4. `release` once, always, also after a failure, a time-out or a cancellation, even of `create`.

    Methods may be `async def`, or plain `def`, which then runs on a thread. Each call has a
    time-out (`rollout.multi_turn.tool_timeout_s`, or `timeout_s` in the tool's `config`). If
    the time is up or the request is cancelled, the call is cancelled: that raises
    `asyncio.CancelledError` inside it. Clean up, and do not catch the error.

    `config.isolation` selects the executor of the methods. `none`: the event loop; code that blocks
    delays every request. `thread`: each call in an event loop of its own on a thread; it may block;
    asyncio objects of one call cannot be used in the next. `process`: one process per request and
    tool, one call at a time, killed on time-out. The tool is then built again in a new process, and
    `release` and `create` run there before the next call. Only a process can stop code that never
    returns.

    These keys of `config` are agentrl's, for every class; the others are the tool's own
    (docs/tools.md has every sub-key):

        isolation: none          none, thread or process
        timeout_s: null          seconds of one call and of each attempt; null: the run's
        retry: null              attempts and pauses of a call that crashed or timed out
        max_concurrency: null    calls of `execute` that run at once, over all requests
        rate_limit: null         calls of `execute` per second, over all requests
        cache: null              declares that equal calls have equal answers
        circuit_breaker: null    fails calls at once after too many failures in a row

    Args:
        config: The complete `config` of the YAML.
        tool_schema: Shown to the model; None: the YAML's, of a class with a constructor
            `(config)`, else the result of `get_openai_tool_schema`.

    Attributes:
        instances: For state of requests, by `instance_id`. It is the tool's own: `release` deletes
            what `create` put there.
    """

    returns_images: bool = False
    """Whether results have images, so that a run needs a chat template that shows them. A tool
    that does not declare it may return them too."""
    required_resources: Mapping[str, float] = MappingProxyType({})
    """`resources` of the tool's entry in the YAML."""
    remote_object: RemoteObject | None = None
    """The process on a Ray cluster in which the calls run; None: they run in this process."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config = config
        self.instances: dict[str, Any] = {}
        given = tool_schema or vars(self).get("tool_schema")
        self.tool_schema = cast("OpenAIFunctionToolSchema", given)
        self.tool_schema = given or self.get_openai_tool_schema()

    @property
    def name(self) -> str:
        """The name by which the model calls the tool: the name in its schema."""
        return vars(self).get("_name") or self.tool_schema.name

    @name.setter
    def name(self, name: str) -> None:
        # Constructors written for verl set it; the loader checks that it equals the schema's.
        self._name = name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema. Override it if the YAML does not need to contain one.

        Raises:
            ConfigError: if there is neither a schema nor an override.
        """
        # An override of users may call this method before a schema was set.
        schema = cast("OpenAIFunctionToolSchema | None", self.tool_schema)
        if schema is None:
            raise ConfigError(
                f"{type(self).__name__} has no schema",
                expected="tool_schema in the YAML, or a class with get_openai_tool_schema",
            )
        return schema

    async def create(
        self, instance_id: str | None = None, *args: Any, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Prepare one request. Called once per request, before its first turn.

        Args:
            instance_id: The request's id.
            *args: Not read; a subclass may pass the right answer on.
            **create_kwargs: The row's `tools_kwargs[name].create_kwargs`.

        Returns:
            The id of the instance, and a response; if it is not empty, it is appended to the
            conversation before the first turn. The id alone is accepted too.

        Raises:
            Exception: Any error fails this request, and no other, with `Fault.TOOL`.
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
            A value that `ToolResult.of` accepts.

        Raises:
            ToolError: Its text is shown to the model, which may try again.
            Exception: The call is repeated if `config.retry` allows it. After the last attempt the
                model is shown a neutral text, and the call is counted as crashed. The request
                continues; with `on_tool_failure: fail` it fails.
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(
        self, instance_id: str, **calc_reward_kwargs: Any
    ) -> float | list[Any] | None:
        """Return the reward of a request. Called once, at its end.

        Returns:
            A number. A list or None is no reward.

        Raises:
            Exception: Any error, and a number that is not finite, fails this request with
                `Fault.TOOL`.
        """
        return 0.0

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Free the resources of a request. Always called, once per `create` that was begun.

        After a time-out of a process-isolated tool it runs in a new process, in which `create` did
        not run: free what is outside the process, and accept that state of the tool is missing.

        Raises:
            Exception: Only recorded.
        """

    async def shutdown(self) -> None:
        """Free the resources of the run: connections, pools. Called once, when a run ends.

        Raises:
            Exception: Only logged.
        """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the tool as its class, `config` and `tool_schema`."""
        return construct, (type(self), self.config, self.tool_schema)


def construct(
    found: type[T], config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
) -> T:
    """Build a tool with the arguments that its constructor takes.

    If it takes no `tool_schema`, `BaseTool.__init__` reads it from the new object.

    Raises:
        ConfigError: if it does not take `config`.
    """
    signature = inspect.signature(found)
    tool = object.__new__(found)
    if tool_schema is not None and "tool_schema" not in signature.parameters:
        tool.tool_schema = tool_schema
    initialize = partial(cast("Any", found).__init__, tool)
    # verl calls constructors by keyword, so the order of the parameters may differ.
    if _takes(signature, config=config, tool_schema=tool_schema):
        initialize(config=config, tool_schema=tool_schema)
    elif _takes(signature, config, tool_schema):
        initialize(config, tool_schema)
    elif _takes(signature, config):
        initialize(config)
    elif _takes(signature, config=config):
        initialize(config=config)
    else:
        raise ConfigError(f"{found.__name__}{signature} takes no config", expected=CONSTRUCTOR)
    return tool


def _takes(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def finite(value: Any, tool: str) -> float:
    """Check a reward of `tool`, and return it as a float.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is NaN or infinite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"tool {tool!r} gave {value!r:.80} as its reward, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"tool {tool!r} gave {number} as its reward, not a finite number")
    return number


def read_reward(value: Any, tool: str) -> float | None:
    """Read the value that `calc_reward` returned; None if it is no reward.

    Tools written for verl return the list of their results, which verl stores and never reads.

    Raises:
        TypeError: if it is neither a number nor a list nor None.
        ValueError: if it is NaN or infinite.
    """
    return None if value is None or isinstance(value, list) else finite(value, tool)


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
