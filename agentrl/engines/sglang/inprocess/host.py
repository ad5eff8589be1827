"""`sglang.Engine` in this process's keep, on a thread and an event loop of its own.

SGLang takes a process for its own: it installs signal handlers that kill the whole process tree,
replaces the event loop's policy and the root logger's handlers, and at its end kills every child
of the process. On a thread that is not the main one it leaves signals alone; what else it changes
is put back; and its own processes, and no others, are ended with it.
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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import psutil

from agentrl.engines.sglang.backend import JsonFields
from agentrl.errors import EngineError

T = TypeVar("T")

CLOSE_TIMEOUT_S = 20.0
_POLL_S = 0.2
_INPUTS = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""Which record of `io_struct` each control request is."""


class SGLangHost:
    """One `sglang.Engine`: started here, asked from any event loop, ended by `close`.

    Args:
        arguments: Of SGLang's `ServerArgs`.
        environment: Variables that SGLang and its processes see.

    Raises:
        EngineError: where it does not start.
    """

    name = "the SGLang engine"

    def __init__(
        self, arguments: Mapping[str, Any], *, environment: Mapping[str, str] | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._running: set[asyncio.Task[Any]] = set()
        self._end: EngineError | None = None
        # Whoever queues a call behind the end would wait for ever. Re-entrant: a signal may come
        # while this thread holds it.
        self._ending = threading.RLock()
        self._engine: Any = None
        self._processes: list[psutil.Process] = []
        self._others = set(multiprocessing.active_children())
        self._before = _take_sigquit(self._on_child_failed)
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._serve,
            args=(dict(arguments), dict(environment or {}), started),
            name="sglang",
            daemon=True,
        )
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._break_off()
            _give_back_sigquit(self._before)
            raise
        atexit.register(self.close)

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Ask for one completion (see `Backend.generate`)."""
        return await self._ask(self._generate(fields))

    async def control(self, request: str, fields: JsonFields | None = None) -> None:
        """Ask for anything else (see `Backend.control`)."""
        await self._ask(self._control(request, dict(fields or {})))

    def close(self) -> None:
        """End SGLang and its processes; running calls end with `EngineError`. May be called
        twice.
        """
        if not self._thread.is_alive():
            return
        atexit.unregister(self.close)
        self._call_soon(self._stop, EngineError("the engine was closed"))
        self._thread.join(CLOSE_TIMEOUT_S)
        _give_back_sigquit(self._before)

    @property
    def pids(self) -> list[int]:
        """Of SGLang's own processes."""
        return [process.pid for process in self._processes]

    # From any thread.

    async def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the engine's loop do something, and wait for it; cancelling cancels it there."""
        with self._ending:
            if self._end is not None:
                work.close()
                raise self._ended()
            asked = asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)
        return await asyncio.wrap_future(asked)

    def _on_child_failed(self, *_: object) -> None:
        """Take the signal by which SGLang's processes tell that one of them failed."""
        error = EngineError(
            "a process of SGLang has ended unexpectedly: what it said is above, if it could",
            expected="where memory ran out: a smaller rollout.engine.sglang.mem_fraction_static "
            "or max_total_tokens",
        )
        self._refuse(error)
        self._call_soon(self._fail, error)

    def _refuse(self, error: EngineError) -> None:
        """Take no more calls."""
        with self._ending:
            self._end = self._end or error

    def _call_soon(self, act: Callable[[EngineError], None], error: EngineError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs on it
            self._loop.call_soon_threadsafe(act, error)

    def _break_off(self) -> None:
        """End a start that nobody waits for: without its processes SGLang gives it up."""
        error = EngineError("the start of SGLang was broken off")
        self._refuse(error)
        self._call_soon(self._stop, error)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            _kill(self._brought())  # SGLang must find them ended, so nobody waits for them here
            self._thread.join(_POLL_S)

    def _brought(self) -> list[psutil.Process]:
        """The processes that a start has brought so far, and what they have started."""
        mine = set(multiprocessing.active_children()) - self._others
        return _with_children([process.pid for process in mine if process.pid is not None])

    def _ended(self) -> EngineError:
        """An error for each caller: one that is raised twice would collect both tracebacks."""
        end = self._end or EngineError("the engine was closed")
        return EngineError(end.args[0], **end.details)

    # On the engine's thread.

    def _serve(
        self,
        arguments: dict[str, Any],
        environment: dict[str, str],
        started: concurrent.futures.Future[None],
    ) -> None:
        asyncio.set_event_loop(self._loop)
        # Its processes inherit this: a Ctrl-C in the terminal is for the trainer alone to answer.
        # Python lifts it where it starts its resource tracker, so that is started before.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _undisturbed(environment):
                self._engine = self._start(arguments)
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: the caller gets it
            _end_processes(self._brought())
            started.set_exception(_explain(error))
            self._loop.close()
            return
        self._processes = _with_children(self._engine.get_all_child_pids())
        started.set_result(None)
        try:
            self._loop.run_forever()
        finally:
            self._shut_down()

    def _start(self, arguments: dict[str, Any]) -> Any:
        engine = _engine_class()  # takes seconds
        if self._end is not None:
            raise self._ended()
        return engine(**arguments)

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something for a caller, unless the engine has ended or ends meanwhile."""
        if self._end is not None:
            work.close()
            raise self._ended()
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._end is not None:
                raise self._ended() from None
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
                asked = getattr(io_struct, _INPUTS[request])(**fields)
                answer = await getattr(manager, request)(asked)
        except Exception as error:
            raise _refusal(error) from error
        _check(request, answer)

    def _abort(self, rid: str, **fields: Any) -> None:
        manager = self._engine.tokenizer_manager
        # SGLang passes an abort on once for each call, even where it came before the call itself.
        state = manager.rid_to_state.get(rid)
        if state is not None:
            state.abort_sent = False
        manager.abort_request(rid=rid, **fields)

    def _fail(self, error: EngineError) -> None:
        """End every call with an error; the engine takes no more."""
        self._refuse(error)
        for task in self._running:
            task.cancel()

    def _stop(self, error: EngineError) -> None:
        self._fail(error)
        self._loop.call_soon(self._loop.stop)

    def _shut_down(self) -> None:
        watchdog = self._engine.tokenizer_manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()
        atexit.unregister(self._engine.shutdown)  # it would kill every child of this process
        _end_processes(self._processes)
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        _close_sockets(self._engine)
        self._loop.close()


def _close_sockets(engine: Any) -> None:
    """Close what SGLang leaves open: the interpreter's end would tear it down in any order."""
    manager = engine.tokenizer_manager
    sockets = (manager.recv_from_detokenizer, manager.send_to_scheduler, engine.send_to_rpc)
    for context in {socket.context for socket in sockets if socket is not None}:
        context.destroy(linger=0)


def _engine_class() -> Any:
    from sglang.srt.entrypoints.engine import Engine

    return Engine


def _with_children(pids: Iterable[int]) -> list[psutil.Process]:
    """Processes and what they have started."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {p.pid: p for p in (process, *process.children(recursive=True))}
    return list(found.values())


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _end_processes(processes: list[psutil.Process]) -> None:
    _kill(processes)
    psutil.wait_procs(processes, timeout=CLOSE_TIMEOUT_S)


@contextlib.contextmanager
def _undisturbed(environment: Mapping[str, str]) -> Iterator[None]:
    """Let SGLang start in an environment, and put back what it changes in this process."""
    policy, random_state = asyncio.get_event_loop_policy(), random.getstate()
    variables = dict(os.environ)
    start_method = multiprocessing.get_start_method(allow_none=True)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    os.environ.update(environment)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that other devices have
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        asyncio.set_event_loop_policy(policy)
        random.setstate(random_state)
        multiprocessing.set_start_method(start_method, force=True)
        root.handlers[:], root.level = handlers, level


def _take_sigquit(handler: Any) -> Any:
    """Take the signal that SGLang's processes send when they fail; it would end this process.

    Only the main thread may. An engine that is built on another one leaves the signal as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGQUIT, handler)


def _give_back_sigquit(before: Any) -> None:
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, before)


def _refusal(error: Exception) -> EngineError:
    """Word what SGLang refuses: bad input is a `ValueError`, the rest an HTTP exception."""
    said = getattr(error, "detail", None) or str(error) or type(error).__name__
    return EngineError(f"SGLang refused: {said}")


def _check(request: str, answer: Any) -> None:
    """Refuse an answer that says that the request was not done."""
    success, message = True, ""
    if isinstance(answer, tuple):
        success, message = answer[0], answer[1]
    elif answer is not None:
        success, message = answer.success, answer.message
    if not success:
        raise EngineError(f"SGLang could not {request.replace('_', ' ')}: {message}")


def _explain(error: BaseException) -> EngineError:
    return EngineError(f"SGLang did not start: {error}", expected=_ADVICE)


_ADVICE = (
    "with too little memory a smaller rollout.engine.sglang.mem_fraction_static; with too few "
    "devices a smaller tp_size; with an attention that the device lacks another attention_backend; "
    "rollout.engine.sglang.log_level=info tells more"
)
