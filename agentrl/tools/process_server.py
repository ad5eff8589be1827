"""Have the server from which tools' processes are forked import the main module, once.

It is asked to (`set_forkserver_preload`), but Python 3.11 and the first releases of 3.12 and 3.13
lose the path on the way: there, each process would import the main module again, with all that it
imports (https://github.com/python/cpython/issues/126631). So the path travels in the environment.
Importing this module in the server does the rest; elsewhere it does nothing.
"""

import multiprocessing
import os
import threading
from contextlib import suppress
from multiprocessing import forkserver, spawn

_VARIABLE = "_AGENTRL_TOOL_SERVER_MAIN"
_starting = threading.Lock()


def ensure_server() -> None:
    """Start the server where it does not run. Blocks; cheap where it does."""
    with _starting:
        path = spawn.get_preparation_data("").get("init_main_from_path")
        if path is not None:
            os.environ[_VARIABLE] = path
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop(_VARIABLE, None)


def _import_main() -> None:
    path = os.environ.pop(_VARIABLE, None)
    if path is None:
        return
    # As the server itself does it: code that is not guarded may start no process meanwhile.
    process = multiprocessing.current_process()
    vars(process)["_inheriting"] = True
    # What goes wrong here goes wrong again in the first process, and is told there.
    with suppress(Exception):
        spawn.import_main_path(path)
    del vars(process)["_inheriting"]


_import_main()
