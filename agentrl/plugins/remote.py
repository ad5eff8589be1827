"""Plug-ins that run in a process of their own, because they ask for resources (`resources`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class RemoteObject(Protocol):
    """An object in another process, which is started again when it dies.

    Cancelling a call cancels it in the other process too.

    Raises:
        WorkerLostError: From each method: the process died, or cannot be reached. What the object
            knew is lost.
    """

    name: str
    """For messages to users."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call an `async` method of the object."""
        ...

    async def wait_until_ready(self) -> None:
        """Wait until the process has made its object, also if it is starting again."""
        ...


Remotes = Mapping[str, RemoteObject]
"""The remote objects of a run's plug-ins, by `PlacedPlugin.key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPlugin:
    """A plug-in that runs where its resources are."""

    key: str
    """`tool NAME` or `scorer NAME`: also its name in errors."""
    resources: dict[str, float]
    factory: str
    """The class of the remote object, or a function that makes it, `module:name`."""
    arguments: tuple[Any, ...]
    """Its arguments; they can be sent to another process."""
