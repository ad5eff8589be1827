"""Run a tool in a process that can be killed.

One process serves one tool of one request, from `create` to `release`; it is used for no other, so
that no state can cross. It is forked from a server that has imported agentrl and the main module
(`agentrl.tools.process_server`), but has none of the trainer's state and threads. As with every
Python library that starts processes, a script that trains must guard its entry with
`if __name__ == "__main__"`.
"""

import asyncio
import inspect
import os
import pickle
import signal
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.errors import ToolError, ToolLifeError, text_of, words_of
from agentrl.plugins import load_module
from agentrl.plugins.call import in_thread, place_of, traceback_of
from agentrl.plugins.environment import end_with_parent
from agentrl.plugins.loading import FILE_MODULE_PREFIX
from agentrl.tools.base import BaseTool
from agentrl.tools.lanes import MethodCall
from agentrl.tools.process_server import context, ensure_server, wait_for_server

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
