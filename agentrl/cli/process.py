"""The process of a command: its signals, its rank, its end."""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from agentrl.trainer.process_exit import end_process


def is_one_of_many() -> bool:
    """Whether torchrun, or what does as it does, started this process among others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def name_rank_in_logs() -> None:
    """Let each line of a log say whose it is, where several ranks share a terminal."""
    if is_one_of_many():
        logging.basicConfig(format=f"{rank_name()}: %(message)s")


def rank_name() -> str:
    """Name this process among the others."""
    return f"rank {os.environ.get('RANK', '?')}"


def leave_rank(end: BaseException) -> NoReturn:
    """Leave a rank that is done or has failed, without taking the interpreter down.

    gloo's threads let go of the last exchange's tensors a moment after it is over. For that they
    need Python, and where they find it being taken down they abort the process: a run that
    succeeded would end as one that crashed. And the others learn of a failure by the end of this
    process alone, so it must not wait for anything.
    """
    if not isinstance(end, SystemExit):
        traceback.print_exception(end)
    logging.shutdown()
    end_process(exit_code(end))


def exit_code(end: BaseException) -> int:
    """Give the exit code of a process that ends by an exception."""
    if not isinstance(end, SystemExit):
        return 1
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def import_from_here() -> None:
    """Let class paths of a run file lead to modules of the working directory.

    `python -m agentrl` finds them there by itself; the installed command would not. The directory
    comes last, so that none of its files can stand in for a library.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def stop_cleanly_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that what a scheduler ends is ended cleanly.

    This is for the time before the loop and after it, which hears both signals itself. Under
    torchrun SIGTERM keeps its meaning there: a rank that waits for the others could not answer.
    """
    if not is_one_of_many():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> None:
    # A shell starts background jobs with SIGINT ignored; SIGTERM must reach them all the same.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
