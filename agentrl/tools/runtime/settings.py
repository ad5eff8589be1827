"""The keys of a tool's `config` that agentrl reads itself: how its calls run, and their limits."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError
from agentrl.plugins.call import ExecutionMode
from agentrl.plugins.keys import read_keys


class RetrySettings(Section):
    """`retry`: how often, and after which pauses, a call that the tool failed is repeated.

    The pause doubles from one attempt to the next. A random part is added, and the sum is limited.
    """

    max_attempts: int = Field(default=1, ge=1, description="attempts of one call, at least 1")
    wait_initial_s: float = Field(default=0.1, ge=0, description="seconds, at least 0")
    wait_max_s: float = Field(default=5.0, ge=0, description="seconds, at least 0")
    wait_jitter_s: float = Field(default=1.0, ge=0, description="seconds, at least 0")

    def pause_s(self, attempt: int) -> float:
        """Return the seconds to wait after a failed attempt, counted from 1."""
        jitter_s = random.uniform(0, self.wait_jitter_s)
        return min(self.wait_initial_s * 2.0 ** (attempt - 1) + jitter_s, self.wait_max_s)


class RateSettings(Section):
    """`rate_limit`: calls that may start at once, and in each period on average."""

    calls: float = Field(ge=1, description="calls, at least 1")
    per_s: float = Field(default=1.0, gt=0, description="seconds, more than 0")

    @model_validator(mode="before")
    @classmethod
    def _of_number(cls, value: Any) -> Any:
        """Read a bare number as calls per second; half a call per second is one in two seconds."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return value
        if value <= 0:
            raise ValueError("not more than 0")
        return {"calls": max(1.0, value), "per_s": max(1.0, 1 / value)}


class CacheSettings(Section):
    """`cache`: how many answers are stored, and for how long."""

    max_entries: int = Field(default=1024, ge=1, description="answers, at least 1")
    ttl_s: float | None = Field(default=None, gt=0, description="seconds, more than 0, or null")


class BreakerSettings(Section):
    """`circuit_breaker`: failures in a row that open it, and seconds until it tries a call."""

    max_failures: int = Field(default=5, ge=1, description="failures in a row, at least 1")
    reset_s: float = Field(default=30.0, gt=0, description="seconds, more than 0")


class ToolSettings(BaseModel):
    """The keys of a tool's `config` that agentrl reads; the other keys are the tool's own.

    All but the first two concern `execute` alone, for all requests of a rank together
    (`agentrl.tools.runtime.middleware`). None turns a feature off.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    isolation: ExecutionMode = Field(
        default=ExecutionMode.INLINE, description="none, thread or process"
    )
    timeout_s: float | None = Field(default=None, gt=0, description="seconds, more than 0")
    """Seconds of one call of one method, and of each attempt; None: the run's `tool_timeout_s`."""
    retry: RetrySettings | None = Field(
        default=None,
        description="a mapping of max_attempts, wait_initial_s, wait_max_s, wait_jitter_s",
    )
    """Repeats a call that crashed or timed out; only you know whether it may be repeated."""
    max_concurrency: int | None = Field(default=None, ge=1, description="calls, at least 1")
    """Calls of this tool that run at once."""
    rate_limit: RateSettings | None = Field(
        default=None, description="calls per second, more than 0, or a mapping of calls, per_s"
    )
    """Calls of this tool that start in a period."""
    cache: CacheSettings | None = Field(
        default=None, description="a mapping of max_entries, ttl_s; {} takes the defaults"
    )
    """Declares that equal arguments get equal answers, in every request."""
    circuit_breaker: BreakerSettings | None = Field(
        default=None, description="a mapping of max_failures, reset_s; {} takes the defaults"
    )
    """Fails calls at once while a service that the tool needs is down."""

    @property
    def has_middleware(self) -> bool:
        """Whether a call passes any middleware on its way to the tool."""
        guards = (self.max_concurrency, self.retry, self.cache, self.rate_limit)
        is_guarded = any(guard is not None for guard in (*guards, self.circuit_breaker))
        return is_guarded or self.isolation is ExecutionMode.PROCESS

    @classmethod
    def check(
        cls, config: Mapping[str, Any], *, file: str | Path | None = None, key: str = "config"
    ) -> "ToolSettings":
        """Read a tool's `config`.

        Raises:
            ConfigError: for an invalid value, and for an unknown key of a section, with the nearest
                known one.
        """
        if _KEYS.isdisjoint(config):
            return _DEFAULTS  # settings are read for each tool of each request: this is fast
        return read_keys(cls, config, file=file, key=key)

    @classmethod
    def of(
        cls,
        tool_class: type,
        config: Mapping[str, Any],
        *,
        file: str | Path | None = None,
        key: str = "config",
    ) -> "ToolSettings":
        """Read a tool's `config` without the keys that are the tool's own (`own_keys`).

        Raises:
            ConfigError: as `check` does; for a class of users it says how to keep a key.
        """
        own = own_keys(tool_class, config)
        shared = {name: value for name, value in config.items() if name not in own}
        try:
            return cls.check(shared if own else config, file=file, key=key)
        except ConfigError as error:
            name = str(error.details.get("key", "")).removeprefix(f"{key}.").partition(".")[0]
            if name in _OFTEN_OWN and not tool_class.__module__.startswith(_BUNDLED):
                error.details["expected"] = f"{error.details['expected']}; {_KEEP_IT}"
            raise


_KEYS = frozenset(ToolSettings.model_fields)
_OFTEN_OWN = frozenset({"retry", "rate_limit", "cache", "circuit_breaker"})
_KEEP_IT = (
    "if the key is the tool's own, rename it, or add type: native to config, as verl's files have "
    "it: plain values of this key are then the tool's"
)
_BUNDLED = "agentrl."
_DEFAULTS = ToolSettings()

SHARED_KEYS = _KEYS | {"type"}
"""Keys of every tool's `config`, which a bundled tool does not read itself. `type` is verl's."""


def own_keys(tool_class: type, config: Mapping[str, Any]) -> set[str]:
    """Return the keys of `config` that are named like agentrl's, and are the tool's own.

    An entry with verl's `type` was written for verl. There, tools read such keys themselves:
    `rate_limit: 10` means ten calls at once. If the value is a mapping, the key is agentrl's.

    Args:
        tool_class: The tool's class; agentrl's own classes have no such keys.
        config: The entry's `config`.
    """
    if "type" not in config or tool_class.__module__.startswith(_BUNDLED):
        return set()
    plain = (name for name in _OFTEN_OWN if config.get(name) is not None)
    return {name for name in plain if not isinstance(config[name], Mapping)}
