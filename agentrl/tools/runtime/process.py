"""Run a tool in a process that can be killed.

One process serves one tool of one request, from `create` to `release`. It is used for no other
request, so that no state can leak. Processes are forked from a server that has imported agentrl and
the main module, and has none of the trainer's state and threads. As with every Python library that
starts processes, a script that trains must guard its entry with `if __name__ == "__main__"`.

multiprocessing lets the server import the main module (`set_forkserver_preload`), but Python 3.11
and the first releases of 3.12 and 3.13 lose its path (https://github.com/python/cpython/issues/126631):
every process would import the main module again. So the path travels in the environment, and the
import of this module in the server imports the main module. In other processes that does nothing.
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
from typing import Any, NamedTuple

from agentrl.errors import ToolError, ToolLifeError, text_of, words_of
from agentrl.plugins import load_module
from agentrl.plugins.call import (
    CallTimeoutError,
    call_bounded,
    in_thread,
    setting_up,
    source_line,
    traceback_of,
)
from agentrl.plugins.environment import end_with_parent
from agentrl.plugins.loading import FILE_MODULE_PREFIX
from agentrl.tools.base import BaseTool
from agentrl.tools.runtime.executors import MethodCall, ToolExecutor

START_S = 120.0
"""Seconds that the server may take to import the main module."""
_KILL_WAIT_S = 5.0
_VARIABLE = "_AGENTRL_TOOL_SERVER_MAIN"
_starting = threading.Lock()
_children = threading.Lock()
"""Held while a process is started or closed: `start` polls every child, and up to Python 3.11.2 it
fails if another thread is just closing one."""
_ready = threading.Event()

PRELOADED = ("__main__", __name__)
"""Modules that the server imports."""
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*PRELOADED])


async def wait_for_server() -> None:
    """Wait until a process can be started at once, so that no call's time-out includes the start.

    Raises:
        ToolLifeError: if the server does not start in time.
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
    """Start the server if it does not run. Does not wait for its imports."""
    with _starting:
        main = spawn.get_preparation_data("")
        if "init_main_from_path" in main:
            os.environ[_VARIABLE] = json.dumps([main["init_main_from_path"], main["sys_path"]])
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop(_VARIABLE, None)


def _start() -> None:
    """Start the server, and wait until it has forked a process, which does nothing."""
    ensure_server()
    process = context.Process(target=int, daemon=True)
    with _children:
        process.start()
    process.join()
    _ready.set()


def _import_main() -> None:
    """Import the main module, if this process is the server."""
    if (main := os.environ.pop(_VARIABLE, None)) is None:
        return
    path, sys.path = json.loads(main)
    # As multiprocessing does: during the import, unguarded code must not start a process.
    process = multiprocessing.current_process()
    vars(process)["_inheriting"] = True
    # An error here is raised again in the first process, and reported there.
    with suppress(Exception):
        spawn.import_main_path(path)
    del vars(process)["_inheriting"]
    # Exclude the imported objects from collections: touching a page copies it.
    gc.collect()
    gc.freeze()


class ProcessExecutor(ToolExecutor):
    """Run in a process, one call at a time. Cancelling a call kills the process.

    The process builds the tool again, from its class, `config` and `tool_schema`.
    """

    def __init__(self, tool: BaseTool) -> None:
        super().__init__(tool)
        self.request_lock = asyncio.Lock()
        self._worker: _Worker | None = None
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether a process was killed, or died, since the last `create`."""
        return self._is_lost

    async def open(self) -> None:
        """Start the process and build the tool in it, within `START_S`; a model may be loaded.

        Raises:
            ToolLifeError: if the process does not start, or the tool cannot be built in it.
        """
        if self._worker is None:
            await self._start()

    async def _start(self) -> "_Worker":
        await wait_for_server()
        self._worker = worker = _Worker(self.tool)
        try:
            start = partial(in_thread, worker.start)
            await call_bounded(start, timeout_s=START_S, name=f"tool:{self.tool.name}")
        except BaseException:
            await self.close()
            raise
        return worker

    async def run(self, call: MethodCall) -> Any:
        """Make the call in the process; start the process if there is none.

        The start does not count as time of the call.

        Raises:
            ToolError: if the tool raised one.
            ToolLifeError: if the tool raised another error, or the process died.
        """
        if call.method == "create":
            self._is_lost = False
        try:
            if (worker := self._worker) is None:
                with setting_up():
                    worker = await self._start()
            return await in_thread(partial(worker.ask, call))
        except (asyncio.CancelledError, ProcessDiedError):
            self._is_lost = True
            await self.close()
            raise

    async def close(self) -> None:
        """Kill the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await in_thread(worker.kill)


class PackedTool(NamedTuple):
    """A tool that another process builds again, from its class, `config` and `tool_schema`."""

    source_file: str | None
    """The file with the tool's class, if it is in no importable module."""
    pickled: bytes

    @classmethod
    def of(cls, tool: BaseTool) -> "PackedTool":
        """Pack a tool."""
        function = vars(tool).get("function")
        owner = function if inspect.isfunction(function) else type(tool)
        in_file = owner.__module__.startswith(FILE_MODULE_PREFIX)
        source_file = str(Path(inspect.getfile(owner))) if in_file else None
        return cls(source_file, pickle.dumps(tool))

    def build(self) -> BaseTool:
        """Import the file, and build the tool."""
        if self.source_file is not None:
            load_module(self.source_file)
        return pickle.loads(self.pickled)


class ProcessDiedError(ToolLifeError):
    """The process ended by itself, or was killed, during a call."""


class _Worker:
    """The parent's side of one process. Methods block; `kill` may run while `ask` does."""

    def __init__(self, tool: BaseTool) -> None:
        self._connection, child = context.Pipe()
        self._child_connection = child
        self._name = tool.name
        self._process = context.Process(
            target=_serve,
            args=(child, PackedTool.of(tool)),
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
                return  # the call that needs it was cancelled
            ensure_server()
            with _children:
                self._process.start()
            self._child_connection.close()
        self.ask(None)

    def ask(self, call: MethodCall | None) -> Any:
        """Make a call and wait for its answer; None: wait until the tool is built."""
        with self._asking:
            number, value, error = None, None, None
            try:
                if call is not None:
                    self._num_calls += 1
                    self._connection.send((self._num_calls, call))
                while number != self._num_calls:  # skip what a child of the tool may have sent
                    number, value, error = self._connection.recv()
            except (EOFError, OSError):
                self._process.join(_KILL_WAIT_S)
                exit_code = self._process.exitcode
                doing = call.method if call else "its start"
                raise ProcessDiedError(
                    f"the process of tool {self._name!r} died in {doing}",
                    exit_code=exit_code,
                    reason="it was killed: by the system, if memory ran out"
                    if exit_code == -signal.SIGKILL
                    else None,
                ) from None
        if error is not None:
            raise error
        return value

    def kill(self) -> None:
        with self._starting:
            self._is_killed = True
            pid = self._process.pid
        if pid is not None:
            # The process leads a group of its own, which includes what the tool started.
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._process.kill()
            self._process.join(_KILL_WAIT_S)
        # Close the descriptors now: the garbage collector runs rarely during a rollout. Wait until
        # `ask` no longer reads from them; it ends with the process.
        if self._asking.acquire(timeout=_KILL_WAIT_S):
            self._connection.close()
            self._child_connection.close()
            if pid is None or self._process.exitcode is not None:
                with _children:
                    self._process.close()


def _serve(connection: Connection, packed: PackedTool) -> None:
    """Answer calls until the other end closes. This is the whole life of the process."""
    os.setsid()
    # Ctrl-C is the trainer's. Programs that the tool starts would inherit SIG_IGN, not a handler.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    end_with_parent()  # a call that never returns does not see that the other end has closed
    pid = os.getpid()

    def reply(number: int, value: Any, error: Exception | None) -> None:
        if os.getpid() != pid:
            os._exit(0)  # the tool forked this copy: it must not answer for the tool
        try:
            connection.send((number, value, error))
        except Exception as failure:  # noqa: BLE001 - pickling runs code of users
            message = f"the answer cannot leave its process: {words_of(failure)}"
            connection.send((number, None, ToolLifeError(message)))

    with asyncio.Runner() as runner, suppress(EOFError):
        try:
            tool = packed.build()
        except Exception as error:  # noqa: BLE001 - building runs code of users
            reply(0, None, sendable(error))
            return
        reply(0, None, None)
        while True:
            number, call = connection.recv()
            reply(number, *runner.run(_answer(tool, call)))


async def _answer(tool: BaseTool, call: MethodCall) -> tuple[Any, Exception | None]:
    try:
        return await call.on(tool), None
    except BaseException as error:  # noqa: BLE001 - the boundary around code of users
        return None, sendable(error)


def sendable(error: BaseException) -> ToolError | ToolLifeError:
    """Return an error that can be pickled: its text, with the traceback as a note."""
    if isinstance(error, ToolError):
        # Send the text only: a subclass of users may be picklable, but not unpicklable.
        return ToolError(text_of(error))
    sent = ToolLifeError(words_of(error), at=source_line(error))
    sent.add_note(traceback_of(error))
    return sent


_import_main()
