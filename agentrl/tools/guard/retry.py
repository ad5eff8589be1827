"""Repeat a call that the tool failed."""

import logging

from stamina import AsyncRetryingCaller

from agentrl.errors import ToolError
from agentrl.tools.base import ToolResult
from agentrl.tools.guard.path import UnavailableError, Visit, Way
from agentrl.tools.settings import RetrySettings

logger = logging.getLogger(__name__)


class Retry:
    """Repeat what crashed or was late, after a growing pause with a random part.

    Never behind a `ToolError`, which is an answer. Each attempt goes through the rest of the way
    anew: it queues, and has the whole time-out.
    """

    def __init__(self, settings: RetrySettings) -> None:
        self._caller = AsyncRetryingCaller(
            attempts=settings.max_attempts,
            timeout=None,
            wait_initial=settings.wait_initial_s,
            wait_max=settings.wait_max_s,
            wait_jitter=settings.wait_jitter_s,
        )

    async def __call__(self, visit: Visit, go_on: Way) -> ToolResult:
        """Go on until it is answered, or the attempts are used up.

        Raises:
            Exception: of the last attempt that was made.
        """
        last: list[Exception] = []

        def is_worth_another(error: Exception) -> bool:
            if isinstance(error, ToolError | UnavailableError):
                return False
            last[:] = [error]
            what = f"{type(error).__name__}: {error}"
            place = visit.call.function.name, visit.call.id, visit.num_attempts
            logger.info("tool %r, call %s, attempt %d: %s", *place, what)
            return True

        try:
            return await self._caller(is_worth_another, go_on, visit)
        except UnavailableError as refusal:
            # The attempts before opened the breaker: their failure is what happened to this call.
            raise (last or [refusal])[0] from None
