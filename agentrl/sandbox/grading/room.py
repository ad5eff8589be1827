"""How many solutions are graded at once: as many as there are cores, whoever asks."""

import asyncio

from agentrl.plugins.call import PerLoop
from agentrl.plugins.environment import num_cores

_ROOMS = PerLoop(lambda: asyncio.Semaphore(num_cores()))


def grading_room() -> asyncio.Semaphore:
    """Give the event loop's one room for gradings; scorers and reviewers share it.

    Tests have a time-out of wall clock. Where more of them compute than there are cores, they take
    each other's time, and right code comes out as late. So enter it before a clock starts.

    Example:
        >>> async with grading_room():
        ...     found = await grade(code, tests, sandbox)
    """
    return _ROOMS.get()
