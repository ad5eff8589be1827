"""The server from which tools' processes are forked: started once, with the main module in it.

It is asked to import the main module (`set_forkserver_preload`), but Python 3.11 and the first
releases of 3.12 and 3.13 lose the path on the way: there, each process would import it again, with
all that it imports (https://github.com/python/cpython/issues/126631). So the path, and where to
import from, travel in the environment, and importing this module in the server does the rest;
elsewhere it does nothing.
"""

import asyncio
import gc
import inspect
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.errors import ToolError, ToolLifeError, text_of, words_of
from agentrl.plugins import load_module
from agentrl.plugins.call import CallTimeoutError, call_bounded, in_thread, place_of, traceback_of
from agentrl.plugins.environment import end_with_parent
from agentrl.plugins.loading import FILE_MODULE_PREFIX
from agentrl.tools.base import BaseTool
from agentrl.tools.runtime.executors import MethodCall

START_S = 120.0
"""Seconds that the server may take to import the main module."""

_VARIABLE = "_AGENTRL_TOOL_SERVER_MAIN"
_starting = threading.Lock()
_ready = threading.Event()

PRELOADED = ("__main__", __name__)
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*PRELOADED])


async def wait_for_server() -> None:
    """Wait until a process can be started at once: the time-out of no call has to bear the start.

    Raises:
        ToolLifeError: where the server does not come up.
    """
    if _ready.is_set():
        return
    try:
        await call_bounded(lambda: in_thread(_start), timeout_s=START_S, name="tools' processes")
    except CallTimeoutError:
        raise ToolLifeError(
            f"the server of the tools' processes did not start within {START_S:g} s",
            expected='a main module that imports fast, its entry under `if __name__ == "__main__"`',
        ) from None


def ensure_server() -> None:
    """Start the server where it does not run. Cheap where it does; waits for no import."""
    with _starting:
        told = spawn.get_preparation_data("")
        if "init_main_from_path" in told:
            os.environ[_VARIABLE] = json.dumps([told["init_main_from_path"], told["sys_path"]])
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop(_VARIABLE, None)


def _start() -> None:
    """Start the server, and wait for the first process that it forks."""
    ensure_server()
    process = context.Process(target=_do_nothing, daemon=True)
    process.start()
    process.join()
    _ready.set()


def _do_nothing() -> None:
    """Be forked: that is all."""


def _import_main() -> None:
    told = os.environ.pop(_VARIABLE, None)
    if told is None:
        return
    path, sys.path = json.loads(told)
    # As the server itself does it: code that is not guarded may start no process meanwhile.
    process = multiprocessing.current_process()
    vars(process)["_inheriting"] = True
    # What goes wrong here goes wrong again in the first process, and is told there.
    with suppress(Exception):
        spawn.import_main_path(path)
    del vars(process)["_inheriting"]
    # No process has to search what was imported: touching a page copies it.
    gc.collect()
    gc.freeze()


_KILL_WAIT_S = 5.0


class ProcessLane:
    """Run in a process, one call at a time; a call that is cancelled takes the process with it.

    Args:
        tool: Built again in the process from its class, `config` and `tool_schema`.
    """

    def __init__(self, tool: BaseTool) -> None:
        self._tool = tool
        self._worker: _Worker | None = None
        self._is_lost = False
        self.gate = asyncio.Lock()
        """Held around each execution: the calls of one request run one after another."""

    @property
    def is_lost(self) -> bool:
        """Whether a process was killed, or died, since the last `create`."""
        return self._is_lost

    async def open(self) -> None:
        """Wait until processes can be started.

        Raises:
            ToolLifeError: where they cannot.
        """
        await wait_for_server()

    async def run(self, call: MethodCall) -> Any:
        """Make the call in the process; start one where there is none.

        Raises:
            ToolError: as the tool raised it.
            ToolLifeError: for anything else that the tool raised, and where the process died.
        """
        if call.method == "create":
            self._is_lost = False
        try:
            worker = await self._started()
            return await in_thread(partial(worker.ask, call))
        except (asyncio.CancelledError, ProcessDiedError):
            self._is_lost = True
            await self._kill()
            raise

    async def close(self) -> None:
        """Kill the process: behind `release` there is nothing left in it."""
        await self._kill()

    async def _started(self) -> "_Worker":
        if self._worker is None:
            self._worker = _Worker(self._tool)
            await in_thread(self._worker.start)
        return self._worker

    async def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await in_thread(worker.kill)


class ProcessDiedError(ToolLifeError):
    """The process ended by itself, or was killed, with a call under way."""


class _Worker:
    """The near end of one process. Its methods block; `kill` may be called beside `ask`."""

    def __init__(self, tool: BaseTool) -> None:
        self._connection, far = context.Pipe()
        self._far = far
        self._name = tool.name
        self._process = context.Process(
            target=_serve,
            args=(far, _source_file(tool), pickle.dumps(tool)),
            name=f"tool:{tool.name}",
            daemon=True,
        )
        self._starting = threading.Lock()
        self._asking = threading.Lock()
        self._num_calls = 0
        self._is_killed = False

    def start(self) -> None:
        with self._starting:
            if self._is_killed:
                return  # whoever wanted it was cancelled
            ensure_server()
            self._process.start()
            self._far.close()

    def ask(self, call: MethodCall) -> Any:
        with self._asking:
            self._num_calls += 1
            number, value, error = None, None, None
            try:
                self._connection.send((self._num_calls, call))
                while number != self._num_calls:  # a child that the tool forked may have spoken
                    number, value, error = self._connection.recv()
            except (EOFError, OSError):
                self._process.join(_KILL_WAIT_S)
                raise ProcessDiedError(
                    f"the process of tool {self._name!r} died in {call.method}",
                    exit_code=self._process.exitcode,
                    reason=_why(self._process.exitcode),
                ) from None
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        with self._starting:
            self._is_killed = True
            pid = self._process.pid
        if pid is not None:
            # The process leads a group of its own, with whatever the tool started.
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._process.kill()
            self._process.join(_KILL_WAIT_S)
        self._close()

    def _close(self) -> None:
        """Give the descriptors back now: the collector, which would, comes by rarely in a rollout.

        Not while `ask` reads from them; it ends with the process.
        """
        if self._asking.acquire(timeout=_KILL_WAIT_S):
            self._connection.close()
            self._far.close()
            if self._process.pid is None or self._process.exitcode is not None:
                self._process.close()


def _why(exit_code: int | None) -> str | None:
    if exit_code != -signal.SIGKILL:
        return None
    return "it was killed: by the system, if memory ran out"


def _source_file(tool: BaseTool) -> str | None:
    """Name the file to import first, where the class stands in no importable module."""
    kind = type(tool)
    function = vars(tool).get("function")
    owner = function if inspect.isfunction(function) else kind
    in_file = owner.__module__.startswith(FILE_MODULE_PREFIX)
    return str(Path(inspect.getfile(owner))) if in_file else None


def _serve(connection: Connection, source_file: str | None, tool: bytes) -> None:
    """Answer calls until the other end closes; the whole life of the process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()  # a call that never returns does not see that the other end has closed
    pid = os.getpid()
    with asyncio.Runner() as runner, suppress(EOFError):
        number, call = connection.recv()
        try:
            built = _build(source_file, tool)
            _leave_if_copied(pid)
        except Exception as error:  # noqa: BLE001 - the boundary round users' code
            _reply(connection, number, (None, _broken(error)))
            return
        while True:
            answer = runner.run(_answer(built, call))
            _leave_if_copied(pid)
            _reply(connection, number, answer)
            number, call = connection.recv()


def _leave_if_copied(pid: int) -> None:
    """End this process if the tool forked it: a copy must not answer in the tool's place."""
    if os.getpid() != pid:
        os._exit(0)


def _build(source_file: str | None, tool: bytes) -> BaseTool:
    if source_file is not None:
        load_module(source_file)
    return pickle.loads(tool)


async def _answer(tool: BaseTool, call: MethodCall) -> tuple[Any, Exception | None]:
    try:
        return await call.on(tool), None
    except ToolError as error:
        # Its text, which the model reads; a class of users' own may pack, and not unpack.
        return None, ToolError(text_of(error))
    except BaseException as error:  # noqa: BLE001 - the boundary round users' code
        return None, _broken(error)


def _broken(error: BaseException) -> ToolLifeError:
    told = ToolLifeError(words_of(error), at=place_of(error))
    told.add_note(traceback_of(error))  # a traceback itself does not leave its process
    return told


def _reply(connection: Connection, number: int, answer: tuple[Any, Exception | None]) -> None:
    try:
        connection.send((number, *answer))
    except Exception as error:  # noqa: BLE001 - whatever a user's value raises in pickling
        told = f"the answer cannot leave its process: {words_of(error)}"
        connection.send((number, None, ToolLifeError(told)))


_import_main()
