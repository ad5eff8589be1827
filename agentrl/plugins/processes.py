"""No process of ours outlives the one that started it, whatever it is busy with."""

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """See that this process ends, with its group where it leads one, when its parent is gone.

    Call it in a process that `multiprocessing` started. A thread waits for the parent's end, so
    that Python code that never returns is ended too.
    """
    threading.Thread(target=_await_parent, name="agentrl-parent", daemon=True).start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
