"""Let calls fail at once while what a tool needs is down."""

from purgatory import SyncCircuitBreakerFactory
from purgatory.domain.model import CLOSED, HALF_OPENED, OpenedState

from agentrl.errors import ToolError
from agentrl.tools.base import ToolResult
from agentrl.tools.guard.path import UnavailableError, Visit, Way
from agentrl.tools.settings import BreakerSettings


class Breaker:
    """Open after `max_failures` failed attempts in a row; after `reset_s`, try with one call.

    The states, their counts and times are the library's. Added here: while one call tries, the
    others are refused, and what began before the breaker opened no longer decides; a call that is
    cancelled says nothing, so that the next one tries. A `ToolError` is an answer: the tool works.

    Two stations: `refuse` before the queues, `watch` behind them.
    """

    def __init__(self, name: str, settings: BreakerSettings) -> None:
        self._name = name
        factory = SyncCircuitBreakerFactory(settings.max_failures, settings.reset_s)
        self._circuit = factory.get_breaker(name)
        self._is_tried = False
        """Whether the one call that tries is under way."""

    async def refuse(self, visit: Visit, go_on: Way) -> ToolResult:
        """Go on, unless the breaker is open.

        Raises:
            UnavailableError: where it is.
        """
        self._knock()
        return await go_on(visit)

    async def watch(self, visit: Visit, go_on: Way) -> ToolResult:
        """Go on, unless the breaker is open, and note how it ends.

        Raises:
            UnavailableError: where it is.
        """
        self._knock()
        tries = self._is_tried = self._circuit.context.state == HALF_OPENED
        try:
            result = await go_on(visit)
        except ToolError:
            self._note(None, tries=tries)
            raise
        except Exception as error:
            self._note(error, tries=tries)
            raise
        else:
            self._note(None, tries=tries)
            return result
        finally:
            if tries:
                self._is_tried = False

    def _knock(self) -> None:
        if self._is_tried:
            raise UnavailableError(f"tool {self._name!r} is just being tried again")
        try:
            self._circuit.__enter__()
        except OpenedState:
            raise UnavailableError(f"tool {self._name!r} failed too often lately") from None

    def _note(self, failure: Exception | None, *, tries: bool) -> None:
        if tries or self._circuit.context.state == CLOSED:
            self._circuit.__exit__(type(failure) if failure else None, failure, None)
