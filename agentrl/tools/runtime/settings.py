"""What agentrl itself reads in a tool's `config`: where it runs, and what guards its calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError
from agentrl.plugins.call import ExecutionMode
from agentrl.plugins.keys import read_keys


class RetrySettings(Section):
    """`retry`: how often, and after which pauses, a call is repeated that the tool failed.

    The pause doubles from one attempt to the next; a random part is added, and the sum is cut.
    """

    max_attempts: int = Field(default=1, ge=1, description="attempts of one call, at least 1")
    wait_initial_s: float = Field(default=0.1, ge=0, description="seconds, at least 0")
    wait_max_s: float = Field(default=5.0, ge=0, description="seconds, at least 0")
    wait_jitter_s: float = Field(default=1.0, ge=0, description="seconds, at least 0")


class RateSettings(Section):
    """`rate_limit`: so many calls at once, and no more than that in each period on average."""

    calls: float = Field(ge=1, description="calls, at least 1")
    per_s: float = Field(default=1.0, gt=0, description="seconds, more than 0")

    @model_validator(mode="before")
    @classmethod
    def _of_number(cls, value: Any) -> Any:
        """Take a bare number as calls per second; half a call a second is one in two."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return value
        if value <= 0:
            raise ValueError("not more than 0")
        return {"calls": max(1.0, value), "per_s": max(1.0, 1 / value)}


class CacheSettings(Section):
    """`cache`: how many answers are kept, and for how long."""

    max_entries: int = Field(default=1024, ge=1, description="answers, at least 1")
    ttl_s: float | None = Field(default=None, gt=0, description="seconds, more than 0, or null")


class BreakerSettings(Section):
    """`circuit_breaker`: after how many failures in a row, and for how long, nobody calls."""

    max_failures: int = Field(default=5, ge=1, description="failures in a row, at least 1")
    reset_s: float = Field(default=30.0, gt=0, description="seconds, more than 0")


class ToolSettings(BaseModel):
    """The keys of a tool's `config` that agentrl itself reads; the rest is the tool's.

    All but the first two stand around `execute` alone, for all requests of a rank together
    (`agentrl.tools.runtime.middleware`). None asks for nothing.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    isolation: ExecutionMode = Field(
        default=ExecutionMode.INLINE, description="none, thread or process"
    )
    timeout_s: float | None = Field(default=None, gt=0, description="seconds, more than 0")
    """Of one call of one method, and of each attempt; None: the run's `tool_timeout_s`."""
    retry: RetrySettings | None = Field(
        default=None,
        description="a mapping of max_attempts, wait_initial_s, wait_max_s, wait_jitter_s",
    )
    """Repeats a call that crashed or was late; only you know whether it may be repeated."""
    max_concurrency: int | None = Field(default=None, ge=1, description="calls, at least 1")
    """Calls of this tool that run at once."""
    rate_limit: RateSettings | None = Field(
        default=None, description="calls per second, more than 0, or a mapping of calls, per_s"
    )
    """Calls of this tool in a period."""
    cache: CacheSettings | None = Field(
        default=None, description="a mapping of max_entries, ttl_s; {} takes the defaults"
    )
    """Declares that equal arguments get equal answers, whoever asks."""
    circuit_breaker: BreakerSettings | None = Field(
        default=None, description="a mapping of max_failures, reset_s; {} takes the defaults"
    )
    """Lets calls fail at once while what the tool needs is down."""

    @property
    def is_guarded(self) -> bool:
        """Whether a call meets anything on its way to the tool."""
        return (
            self.isolation is ExecutionMode.PROCESS
            or self.max_concurrency is not None
            or self.retry is not None
            or self.cache is not None
            or self.rate_limit is not None
            or self.circuit_breaker is not None
        )

    @classmethod
    def check(
        cls, config: Mapping[str, Any], *, file: str | Path | None = None, key: str = "config"
    ) -> "ToolSettings":
        """Read a tool's `config`.

        Raises:
            ConfigError: for a value that cannot be meant, and for an unknown key of a section,
                with the nearest known one.
        """
        if _KEYS.isdisjoint(config):
            return _NOTHING  # read for each tool of each request: this costs next to nothing
        return read_keys(cls, config, file=file, key=key)

    @classmethod
    def of(
        cls,
        found: type,
        config: Mapping[str, Any],
        *,
        file: str | Path | None = None,
        key: str = "config",
    ) -> "ToolSettings":
        """Read a tool's `config`, but for the keys that are the tool's own (`own_keys`).

        Raises:
            ConfigError: as `check` does; for a class of users it says how to keep a key.
        """
        own = own_keys(found, config)
        ours = {name: value for name, value in config.items() if name not in own}
        try:
            return cls.check(ours if own else config, file=file, key=key)
        except ConfigError as error:
            name = str(error.details.get("key", "")).removeprefix(f"{key}.").partition(".")[0]
            if name in _OFTEN_OWN and not found.__module__.startswith(_BUNDLED):
                error.details["expected"] = f"{error.details['expected']}; {_KEEP_IT}"
            raise


_KEYS = frozenset(ToolSettings.model_fields)
_OFTEN_OWN = frozenset({"retry", "rate_limit", "cache", "circuit_breaker"})
_KEEP_IT = (
    "if the key is the tool's own, rename it, or add type: native to config, as verl's files have "
    "it: plain values of this key are then the tool's"
)
_BUNDLED = "agentrl."
_NOTHING = ToolSettings()


def own_keys(found: type, config: Mapping[str, Any]) -> set[str]:
    """Find the keys of `config` that have a name of ours, and are the tool's own.

    An entry with verl's `type` was written for verl, whose tools read such keys themselves: there
    `rate_limit: 10` means ten calls at once. Written as mappings, they are ours there too.

    Args:
        found: The tool's class; those that agentrl brings along have no such keys.
        config: Of the entry.
    """
    if "type" not in config or found.__module__.startswith(_BUNDLED):
        return set()
    plain = (name for name in _OFTEN_OWN if config.get(name) is not None)
    return {name for name in plain if not isinstance(config[name], Mapping)}


SHARED_KEYS = _KEYS | {"type"}
"""Keys of every tool's `config`: what a bundled tool need not know. `type` is verl's."""


def refuse_isolation(config: Mapping[str, Any], *, because: str) -> None:
    """Check that a tool is left on the event loop, where what it holds is.

    Args:
        config: The tool's.
        because: Why it gains nothing elsewhere.

    Raises:
        ConfigError: for `isolation: thread` or `process`.
    """
    isolation = ToolSettings.check(config).isolation
    if isolation is not ExecutionMode.INLINE:
        raise ConfigError(
            f"isolation is {str(isolation)!r}: {because}",
            key="config.isolation",
            expected="none, or no such key",
        )
