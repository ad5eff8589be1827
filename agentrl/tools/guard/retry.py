"""Repeat a call that the tool failed."""

import logging

from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential_jitter,
)

from agentrl.errors import ToolError, words_of
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
        self._stop = stop_after_attempt(settings.max_attempts)
        self._wait = wait_exponential_jitter(
            multiplier=settings.wait_initial_s,
            max=settings.wait_max_s,
            jitter=settings.wait_jitter_s,
        )

    async def __call__(self, visit: Visit, go_on: Way) -> ToolResult:
        """Go on until it is answered, or the attempts are used up.

        Raises:
            Exception: of the last attempt that was made.
        """
        last: list[Exception] = []

        def is_worth_another(error: BaseException) -> bool:
            if isinstance(error, ToolError | UnavailableError) or not isinstance(error, Exception):
                return False
            last[:] = [error]
            place = visit.call.function.name, visit.call.id, visit.num_attempts
            logger.info("tool %r, call %s, attempt %d: %s", *place, words_of(error))
            return True

        async def attempt() -> ToolResult:
            return await go_on(visit)

        # One for each visit: it counts as it goes.
        attempts = AsyncRetrying(
            stop=self._stop,
            wait=self._wait,
            retry=retry_if_exception(is_worth_another),
            reraise=True,
        )
        try:
            return await attempts(attempt)
        except UnavailableError as refusal:
            # The attempts before opened the breaker: their failure is what happened to this call.
            raise (last or [refusal])[0] from None
