"""`sglang.Engine` inside this process, on its own thread and event loop.

SGLang expects a process of its own: it installs signal handlers that kill the whole process tree,
replaces the event loop policy and the root logger's handlers, and kills every child of the process
when it ends. It does not touch signals on a thread that is not the main one. The host restores the
rest, and ends SGLang's processes only.
"""
# pyright: reportMissingImports=false

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import psutil

from agentrl.engines.sglang.backend import JsonFields
from agentrl.engines.sglang.processes import kill, with_children
from agentrl.errors import EngineError
from agentrl.plugins.call import PerLoop

T = TypeVar("T")

CLOSE_TIMEOUT_S = 20.0
_POLL_S = 0.2


class LoopInbox:
    """Callbacks from other threads for an event loop, which is woken once for all that wait.

    `call_soon_threadsafe` writes to a socket for each callback and releases the interpreter's lock
    for it, which takes longer than the rest of a call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], object]] = []

    def put(self, act: Callable[[], object]) -> None:
        """Run `act` on the loop, soon. If the loop is closed, do nothing."""
        with self._lock:
            is_first = not self._waiting
            self._waiting.append(act)
        if is_first:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._run_all)

    def _run_all(self) -> None:
        with self._lock:
            acts, self._waiting = self._waiting, []
        for act in acts:
            act()


class _Call:
    """A coroutine on the engine's loop, and the future of its caller on another loop."""

    def __init__(
        self, work: Coroutine[Any, Any, Any], answer: "asyncio.Future[Any]", inbox: LoopInbox
    ) -> None:
        self._work = work
        self._answer = answer
        self._inbox = inbox
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Start the coroutine; on the engine's loop."""
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(lambda task: self._inbox.put(partial(self._resolve, task)))

    def cancel(self) -> None:
        """Cancel the coroutine; on the engine's loop, after `start`."""
        if self._task is not None:
            self._task.cancel()

    def _resolve(self, task: "asyncio.Task[Any]") -> None:
        """Give the caller the result; on the caller's loop."""
        if task.cancelled():
            self._answer.cancel()
            return
        error = task.exception()
        if self._answer.done():  # the caller was canceled
            return
        if error is None:
            self._answer.set_result(task.result())
        else:
            self._answer.set_exception(error)


class SGLangHost:
    """One `sglang.Engine`. It can be used from any event loop; `close` ends it.

    Args:
        arguments: Of SGLang's `ServerArgs`.
        environment: Environment variables for SGLang and its processes.

    Raises:
        EngineError: SGLang does not start.
    """

    name = "the SGLang engine"

    def __init__(
        self, arguments: Mapping[str, Any], *, environment: Mapping[str, str] | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._inbox = LoopInbox(self._loop)
        self._callers = PerLoop(lambda: LoopInbox(asyncio.get_running_loop()))
        self._running: set[asyncio.Task[Any]] = set()
        self._end: EngineError | None = None
        # A call that is queued after the end would wait forever. Re-entrant, because a signal may
        # arrive while this thread holds the lock.
        self._ending = threading.RLock()
        self._engine: Any = None
        self._processes: list[psutil.Process] = []
        self._other_children = set(multiprocessing.active_children())
        self._previous_handler = _replace_sigquit(self._on_child_failed)
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._serve,
            args=(dict(arguments), dict(environment or {}), started),
            name="sglang",
            daemon=True,
        )
        try:
            self._thread.start()
            started.result()
        except BaseException:
            self._cancel_start(started)
            _restore_sigquit(self._previous_handler)
            raise
        atexit.register(self.close)

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Sample one completion (see `Backend.generate`)."""
        return await self._run(self._generate(fields))

    async def control(self, request: str, fields: JsonFields | None = None) -> None:
        """Send any other request (see `Backend.control`)."""
        await self._run(self._control(request, dict(fields or {})))

    def close(self) -> None:
        """End SGLang and its processes. Running calls end with `EngineError`. Can be repeated."""
        if not self._thread.is_alive():
            return
        atexit.unregister(self.close)
        self._call_soon(self._stop, EngineError("the engine was closed"))
        self._thread.join(CLOSE_TIMEOUT_S)
        _restore_sigquit(self._previous_handler)

    @property
    def pids(self) -> list[int]:
        """Return the ids of SGLang's processes."""
        return [process.pid for process in self._processes]

    # These methods run on any thread.

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait for it. Cancelling cancels it there."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._ending:
            if self._end is not None:
                work.close()
                raise self._end_error()
            call = _Call(self._tracked(work), answer, self._callers.get())
            self._inbox.put(call.start)
        try:
            return await answer
        except asyncio.CancelledError:
            self._inbox.put(call.cancel)
            raise

    def _on_child_failed(self, *_: object) -> None:
        """Handle the signal that SGLang's processes send when one of them fails."""
        error = EngineError(
            "a process of SGLang has ended unexpectedly: its own message is above, if it left one",
            expected="if memory ran out: a smaller rollout.engine.sglang.mem_fraction_static or "
            "max_total_tokens",
        )
        self._refuse(error)
        self._call_soon(self._fail, error)

    def _refuse(self, error: EngineError) -> None:
        """Refuse all later calls."""
        with self._ending:
            self._end = self._end or error

    def _call_soon(self, act: Callable[[EngineError], None], error: EngineError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act, error)

    def _cancel_start(self, started: "concurrent.futures.Future[None]") -> None:
        """End a start that was interrupted: SGLang gives up when its processes have ended."""
        error = EngineError("the start of SGLang was interrupted")
        self._refuse(error)
        self._call_soon(self._stop, error)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        # The thread may not look alive yet if the interruption came while it was started.
        while not started.done() and time.monotonic() < deadline:
            kill(self._new_processes())  # without a wait: SGLang must notice the end itself
            concurrent.futures.wait([started], timeout=_POLL_S)
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _new_processes(self) -> list[psutil.Process]:
        """Return the processes that the start has created so far, with their descendants."""
        mine = set(multiprocessing.active_children()) - self._other_children
        return with_children([process.pid for process in mine if process.pid is not None])

    def _end_error(self) -> EngineError:
        """Return a new error for each caller: one raised twice collects both tracebacks."""
        end = self._end or EngineError("the engine was closed")
        return EngineError(end.args[0], **end.details)

    # These methods run on the engine's thread.

    def _serve(
        self,
        arguments: dict[str, Any],
        environment: dict[str, str],
        started: concurrent.futures.Future[None],
    ) -> None:
        asyncio.set_event_loop(self._loop)
        # SGLang's processes inherit the blocked signal: only the trainer reacts to Ctrl-C. Python
        # unblocks it when it starts its resource tracker, so the tracker starts first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _undisturbed(environment):
                self._engine = self._start(arguments)
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            _end_processes(self._new_processes())
            reason = f"SGLang did not start: {error}"
            started.set_exception(EngineError(reason, expected=_START_ADVICE))
            self._loop.close()
            return
        self._processes = with_children(self._engine.get_all_child_pids())
        started.set_result(None)
        try:
            self._loop.run_forever()
        finally:
            self._shut_down()

    def _start(self, arguments: dict[str, Any]) -> Any:
        engine_class = _engine_class()  # the import takes seconds
        if self._end is not None:
            raise self._end_error()
        return engine_class(**arguments)

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a caller's coroutine, unless the engine has ended or ends during it."""
        if self._end is not None:
            work.close()
            raise self._end_error()
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._end is not None:
                raise self._end_error() from None
            raise
        finally:
            self._running.discard(task)

    async def _generate(self, fields: JsonFields) -> JsonFields:
        try:
            return await self._engine.async_generate(**fields)
        except asyncio.CancelledError:
            self._engine.tokenizer_manager.abort_request(fields["rid"])
            raise
        except Exception as error:
            raise _refusal(error) from error

    async def _control(self, request: str, fields: dict[str, Any]) -> None:
        from sglang.srt.managers import io_struct

        manager = self._engine.tokenizer_manager
        try:
            if request == "abort_request":
                self._abort(**fields)
                return
            if request == "flush_cache":
                answer = await manager.flush_cache(**fields)
            else:
                # The record of `update_weight_version` is `UpdateWeightVersionReqInput`.
                record = f"{request.title().replace('_', '')}ReqInput"
                answer = await getattr(manager, request)(getattr(io_struct, record)(**fields))
        except Exception as error:
            raise _refusal(error) from error
        _check(request, answer)

    def _abort(self, rid: str, **fields: Any) -> None:
        manager = self._engine.tokenizer_manager
        # SGLang forwards one abort for each call, even if the abort arrives before the call.
        state = manager.rid_to_state.get(rid)
        if state is not None:
            state.abort_sent = False
        manager.abort_request(rid=rid, **fields)

    def _fail(self, error: EngineError) -> None:
        """End every call with an error, and refuse later ones."""
        self._refuse(error)
        for task in self._running:
            task.cancel()

    def _stop(self, error: EngineError) -> None:
        self._fail(error)
        self._loop.call_soon(self._loop.stop)

    def _shut_down(self) -> None:
        # Calls that were queued before the end start now, and fail with its reason.
        self._loop.run_until_complete(asyncio.sleep(0))
        manager = self._engine.tokenizer_manager
        watchdog = manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        atexit.unregister(self._engine.shutdown)  # it kills every child of this process
        _end_processes(self._processes)
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        # SGLang leaves its sockets open, and the interpreter's end has no defined order.
        sockets = (
            manager.recv_from_detokenizer,
            manager.send_to_scheduler,
            self._engine.send_to_rpc,
        )
        for context in {socket.context for socket in sockets if socket is not None}:
            context.destroy(linger=0)
        self._loop.close()


def _engine_class() -> Any:
    from sglang.srt.entrypoints.engine import Engine

    return Engine


def _end_processes(processes: list[psutil.Process]) -> None:
    kill(processes)
    psutil.wait_procs(processes, timeout=CLOSE_TIMEOUT_S)


@contextlib.contextmanager
def _undisturbed(environment: Mapping[str, str]) -> Iterator[None]:
    """Start SGLang in an environment; restore what it changes in this process."""
    policy, random_state = asyncio.get_event_loop_policy(), random.getstate()
    variables = dict(os.environ)
    start_method = multiprocessing.get_start_method(allow_none=True)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    os.environ.update(environment)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels of other devices
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        asyncio.set_event_loop_policy(policy)
        random.setstate(random_state)
        multiprocessing.set_start_method(start_method, force=True)
        root.handlers[:], root.level = handlers, level


def _replace_sigquit(handler: Any) -> Any:
    """Handle the signal that SGLang's processes send when they fail; it would end this process.

    Only the main thread can. An engine that starts on another thread leaves the signal unchanged.

    Returns:
        The previous handler; None if nothing was changed.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGQUIT, handler)


def _restore_sigquit(before: Any) -> None:
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, before)


def _refusal(error: Exception) -> EngineError:
    """Return the error for a refused request: a `ValueError` or an HTTP exception of SGLang."""
    reason = getattr(error, "detail", None) or str(error) or type(error).__name__
    return EngineError(f"SGLang refused: {reason}")


def _check(request: str, answer: Any) -> None:
    """Raise if the answer says that the request failed."""
    success, message = True, ""
    if isinstance(answer, tuple):
        success, message = answer[0], answer[1]
    elif answer is not None:
        success, message = answer.success, answer.message
    if not success:
        raise EngineError(f"SGLang could not {request.replace('_', ' ')}: {message}")


_START_ADVICE = (
    "if memory is short, a smaller rollout.engine.sglang.mem_fraction_static; with too few devices "
    "a smaller tp_size; if the device lacks an attention, another attention_backend; "
    "rollout.engine.sglang.log_level=info shows more"
)
