"""The server from which tools' processes are forked: started once, with the main module in it.

It is asked to import the main module (`set_forkserver_preload`), but Python 3.11 and the first
releases of 3.12 and 3.13 lose the path on the way: there, each process would import it again, with
all that it imports (https://github.com/python/cpython/issues/126631). So the path, and where to
import from, travel in the environment, and importing this module in the server does the rest;
elsewhere it does nothing.
"""

import gc
import json
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from multiprocessing import forkserver, spawn

from agentrl.errors import ToolLifeError
from agentrl.plugins.call import CallTimeoutError, call_bounded, in_thread

START_S = 120.0
"""Seconds that the server may take to import the main module."""

_VARIABLE = "_AGENTRL_TOOL_SERVER_MAIN"
_starting = threading.Lock()
_ready = threading.Event()

PRELOADED = ("__main__", "agentrl.tools.process", __name__)
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


_import_main()
