"""Score in a pool of processes. A process with a late scorer is killed and replaced.

Workers are forked from a server that has imported the main module and this one, without the
trainer's torch and threads. As with every Python library that starts processes, a script that
trains must guard its entry with `if __name__ == "__main__"`.

Arguments and results are pickled here and not by the pool. So a scorer that cannot be loaded in the
worker, or an error that cannot be read here, costs one score only.
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
"""Seconds added to the longest wait for a worker, because the workers must start."""

context.set_forkserver_preload([*PRELOADED, __name__])


class ScorePool:
    """Scores in processes, which start with the first score. It works on any event loop.

    Args:
        num_workers: Number of processes; None for one per core that this process may use.
        timeout_s: Seconds of one score, from its start in a process.
        max_waiting: Largest number of scores that are requested at once.
    """

    def __init__(self, *, num_workers: int | None, timeout_s: float, max_waiting: int) -> None:
        self._num_workers = num_workers or num_cores()
        self._timeout_s = timeout_s
        # A score may wait for as many late scores as are before it in the queue.
        self._patience_s = START_S + timeout_s * (1 + -(-max_waiting // self._num_workers)) * 2
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()

    async def run(self, scorer: ScoreFn, arguments: Mapping[str, Any]) -> Any:
        """Call a scorer in a process. Cancelling kills the process.

        Raises:
            CallTimeoutError: If the scorer was late; its process was killed.
            RewardError: If its process died.
            PluginError: If the scorer or its arguments cannot be sent to a process.
            Exception: What the scorer raised.
        """
        packed = _pack(scorer), _pack(dict(arguments))
        pool = await in_thread(self._started)
        try:
            async with asyncio.timeout(self._patience_s):
                future = pool.submit(_work, self._timeout_s, *packed)
                packed_result = await asyncio.wrap_future(future)
            result, error = contained(partial(pickle.loads, packed_result))
        except TimeoutError:
            raise CallTimeoutError(f"no answer within {self._timeout_s:g} s") from None
        except ProcessExpired as expired:
            raise RewardError(
                f"the scorer's process died with exit code {expired.exitcode}"
            ) from None
        if error is not None:
            raise error
        return result

    async def close(self) -> None:
        """End the processes and the scorers in them. May be called twice."""
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
            # `active` starts the workers. That is slow, so it runs here and not on the event loop.
            _ = self._pool.active
            return self._pool


def check_sendable(scorer: ScoreFn) -> None:
    """Check that a scorer can be sent to another process.

    Raises:
        PluginError: If it cannot.
    """
    _pack(scorer)


def _pack(sent: object) -> bytes:
    try:
        return pickle.dumps(sent)
    except Exception as error:
        raise PluginError(
            f"{sent!r:.200} cannot be sent to the process that scores: {error}",
            expected="a function at the top of a module or file: no lambda, no closure",
        ) from error


def _work(scorer: bytes, arguments: bytes) -> bytes:
    """Call a scorer (in the worker) and pack its result or its error."""
    try:
        value = with_event_loop(partial(_unpack(scorer), **pickle.loads(arguments)))
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return pickle.dumps((value, None))
    except BaseException as error:  # noqa: BLE001 - the boundary around users' code
        return pack_error(error)


@lru_cache(maxsize=16)
def _unpack(scorer: bytes) -> ScoreFn:
    """Load a scorer once per worker: a scorer that is an object may be large."""
    return pickle.loads(scorer)


def pack_error(error: BaseException) -> bytes:
    """Return a pickled pair of None and the error, or an error with its text."""
    if isinstance(error, Exception):
        try:
            # A traceback can only be sent as text.
            error.add_note("".join(traceback.format_exception(error)))
            packed = pickle.dumps((None, error))
            pickle.loads(packed)  # many errors can be packed but not unpacked
            return packed
        except Exception:  # noqa: BLE001 - then send its text
            pass
    return pickle.dumps((None, RewardError(f"raised {words_of(error)}")))


async def _awaited(value: Any) -> Any:
    return await value
