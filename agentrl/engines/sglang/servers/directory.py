"""Servers that a cluster starts, replaces and knows the addresses of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from agentrl.engines.sglang.arguments import SGLangNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """What is known of one server of a cluster."""

    address: str | None
    """Such as `http://10.0.0.7:41234`; None: it answers no calls now."""
    api_key: str | None = field(default=None, repr=False)
    """The key that its clients must send; None: it has none."""
    problem: str = ""
    """Why it has no address."""
    has_failed: bool = False
    """Whether it has ended by itself, or could not start."""
    is_lost: bool = False
    """Whether it will not be started again."""
    has_needs: bool = True
    """Whether it was given what to run (`ServerDirectory.start`)."""
    log_lines: tuple[str, ...] = ()
    """The last lines of its log, if it has ended or does not start."""


class ServerDirectory(Protocol):
    """The servers of one run, which a cluster places, starts again, and moves to other nodes.

    A server that was just started has the version "unfit" (`UNFIT_VERSION`): no client sends it
    calls before it has the run's weights.
    """

    shares_devices: bool
    """Whether the servers and the training ranks use the same devices, in turns."""

    def start(self, needs: "SGLangNeeds") -> None:
        """Start every server that was not started yet. Waits for nothing; `look_up` reports."""
        ...

    async def look_up(self) -> Sequence[ServerReport]:
        """Report on each server, always in the same order. Returns within a time limit."""
        ...
