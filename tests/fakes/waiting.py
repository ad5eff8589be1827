"""Wait for events, and measure growth: no test depends on the speed of the machine."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true; the limit of the test run ends a wait that has no end."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


def assert_linear(work: Callable[[int], object], size: int) -> None:
    """Assert that work of 8 times the size takes less than 24 times the processor time.

    Quadratic work takes 64 times. The least of three measurements has the least noise.
    """

    def seconds(of: int) -> float:
        begun = time.process_time()
        work(of)
        return time.process_time() - begun

    work(size)
    small, large = (min(seconds(of) for _ in range(3)) for of in (size, 8 * size))
    assert large < 24 * small + 0.01, (small, large)
