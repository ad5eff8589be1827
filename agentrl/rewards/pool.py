"""A pool of processes for scorers that compute: one that is late is killed, and replaced.

Workers are forked from a server that has imported the main module and this one, but no torch of
the trainer and none of its threads. As with every Python library that starts processes, a script
that trains must guard its entry with `if __name__ == "__main__"`.

What goes in and what comes out is pickled here and not by the pool, so that a scorer that cannot
be loaded there, or an error that cannot be read here, costs one score.
"""

import asyncio
import inspect
import pickle
import threading
import traceback
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from pebble import ProcessExpired, ProcessPool

from agentrl.errors import PluginError, RewardError, words_of
from agentrl.plugins.call import CallTimeoutError, contained, in_thread, with_event_loop
from agentrl.plugins.environment import end_with_parent, num_cores
from agentrl.rewards.scoring import ScoreFn
from agentrl.tools.runtime.process import PRELOADED, context, ensure_server

START_S = 60.0
"""What is added to the longest wait for a place among the workers: they must start."""

context.set_forkserver_preload([*PRELOADED, __name__])


class ScorePool:
    """Scores in processes, which start with the first score. Belongs to no event loop.

    Args:
        num_workers: Processes; None: one for each core that this process may use.
        timeout_s: Seconds of one score, from when a process takes it up.
        max_waiting: Scores that are asked for at once, at most.
    """

    def __init__(self, *, num_workers: int | None, timeout_s: float, max_waiting: int) -> None:
        self._num_workers = num_workers or num_cores()
        self._timeout_s = timeout_s
        # Each place in the queue may wait for as many late scores as stand before it.
        self._patience_s = START_S + timeout_s * (1 + -(-max_waiting // self._num_workers)) * 2
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()

    async def run(self, scorer: ScoreFn, told: Mapping[str, Any]) -> Any:
        """Call a scorer in a process. Cancelling kills the process.

        Raises:
            CallTimeoutError: where the scorer was late; its process was killed.
            RewardError: where its process died, or what came cannot be sent.
            PluginError: for a scorer or arguments that cannot be sent to a process.
            Exception: what the scorer raised.
        """
        packed = _pack(scorer), _pack(dict(told))
        pool = await in_thread(self._started)
        try:
            async with asyncio.timeout(self._patience_s):
                future = pool.submit(_work, self._timeout_s, *packed)
                packed_answer = await asyncio.wrap_future(future)
            answer, error = contained(partial(pickle.loads, packed_answer))
        except TimeoutError:
            raise CallTimeoutError(f"no answer within {self._timeout_s:g} s") from None
        except ProcessExpired as expired:
            raise RewardError(
                f"the scorer's process died with exit code {expired.exitcode}"
            ) from None
        if error is not None:
            raise error
        return answer

    async def close(self) -> None:
        """End the processes, and whatever runs in them. May be called twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            await in_thread(pool.join)

    def _started(self) -> ProcessPool:
        with self._lock:
            if self._pool is None or not self._pool.active:
                ensure_server()
                self._pool = ProcessPool(
                    self._num_workers, initializer=end_with_parent, context=context
                )
            # Asking starts the workers, which takes a while: here, and not on the event loop.
            _ = self._pool.active
            return self._pool


def check_sendable(scorer: ScoreFn) -> None:
    """Refuse a scorer that no other process can be told of.

    Raises:
        PluginError: naming it.
    """
    _pack(scorer)


def _pack(sent: object) -> bytes:
    try:
        return pickle.dumps(sent)
    except Exception as error:
        raise PluginError(
            f"{sent!r:.200} cannot be sent to the process that is to score: {error}",
            expected="a function at the top of a module or file: no lambda, no closure",
        ) from error


def _work(scorer: bytes, told: bytes) -> bytes:
    """In the worker: call a scorer, and pack its answer, or what it raised."""
    try:
        value = with_event_loop(partial(_unpack(scorer), **pickle.loads(told)))
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return pickle.dumps((value, None))
    except BaseException as error:  # noqa: BLE001 - the boundary round users' code
        return _pack_error(error)


@lru_cache(maxsize=16)
def _unpack(scorer: bytes) -> ScoreFn:
    """Load a scorer once in a worker: one that is an object may hold much."""
    return pickle.loads(scorer)


def _pack_error(error: BaseException) -> bytes:
    if isinstance(error, Exception):
        try:
            # No traceback can be sent but as words.
            error.add_note("".join(traceback.format_exception(error)))
            packed = pickle.dumps((None, error))
            pickle.loads(packed)  # many errors can be packed, and not unpacked
            return packed
        except Exception:  # noqa: BLE001 - then its words must do
            pass
    return pickle.dumps((None, RewardError(f"raised {words_of(error)}")))


async def _awaited(value: Any) -> Any:
    return await value
