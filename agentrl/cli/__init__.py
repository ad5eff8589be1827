"""The command line: `app.py` has the commands, this module the process that runs one.

No heavy package is imported before a command runs, so that `--help` answers at once. An error that
the user can fix is printed to standard error, and the process ends with exit code 2. SIGINT
(Ctrl-C) and SIGTERM release tools and engines, save the last completed step, and end with exit code
130; Ctrl-C ends `agentrl view` with 0. A second Ctrl-C ends the process immediately.
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from agentrl.cli.app import app, refuse_hydra_options
from agentrl.errors import AgentRLError, is_out_of_memory
from agentrl.trainer.process_exit import end_process, end_without_waiting, report_silent_exit

__all__ = ["app", "leave_rank", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; print an error that the user can fix, and end with exit code 2.

    Args:
        arguments: Arguments of the command; None for those of the process.

    Raises:
        SystemExit: always, with the exit code.
    """
    # `python -m agentrl` finds modules of the working directory, which class paths may name. The
    # installed command must find them too. The folder comes last, so that it hides no library.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    has_ranks = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if has_ranks:
        logging.basicConfig(format=f"{_rank_name()}: %(message)s")
    else:
        # Before and after the training loop, SIGTERM acts as Ctrl-C; the loop handles both itself.
        # Under torchrun SIGTERM keeps its default: a rank that waits for others cannot react.
        signal.signal(signal.SIGTERM, _interrupt)
    if arguments is None:
        report_silent_exit()
    # Otherwise OpenMP's threads spin while they wait, and slow down the engine's thread, tools and
    # other users of the cores. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _run(arguments)
    except BaseException as end:
        if has_ranks:
            leave_rank(end)
        if arguments is None:
            end_without_waiting(_exit_code(end))
        raise


def leave_rank(end: BaseException) -> NoReturn:
    """End the process of a rank that has finished or failed, without shutting down Python.

    gloo's threads release the tensors of the last exchange shortly after it, and need Python to do
    so. If Python is shutting down, they abort the process, and a successful run would look crashed.
    The other ranks learn of a failure only from the end of this process, so it must not wait.
    """
    if not isinstance(end, SystemExit):
        traceback.print_exception(end)
    logging.shutdown()
    end_process(_exit_code(end))


def _run(arguments: Sequence[str] | None) -> None:
    try:
        refuse_hydra_options(sys.argv[1:] if arguments is None else arguments)
        app(args=arguments, prog_name="agentrl")
    except (AgentRLError, OSError) as error:
        _print_error(error)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = f"out of memory: {error}"
        _print_error(AgentRLError(message, expected="a smaller model, or more memory"))
        sys.exit(2)


def _print_error(error: Exception) -> None:
    console = Console(stderr=True)
    if isinstance(error, OSError) and error.filename is not None:
        error = AgentRLError(error.strerror or type(error).__name__, path=error.filename)
    rank = f"{_rank_name()}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    message = f"{rank}error: {error}"
    console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)


def _rank_name() -> str:
    return f"rank {os.environ.get('RANK', '?')}"


def _exit_code(end: BaseException) -> int:
    if not isinstance(end, SystemExit):
        return 1
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _interrupt(*_: object) -> None:
    # A shell starts background jobs with SIGINT ignored; SIGTERM must stop them nevertheless.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
