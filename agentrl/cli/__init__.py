"""The command line, by what its commands are for.

    process.py    signals, ranks, the end of the process
    app.py        the application, and its groups of commands
    rewards.py    reward rescore
    train.py      train, sft, rollout
    inspect.py    doctor, config
    serve.py      serve
    prepare.py    prepare

Nothing heavy is imported before a command runs, so that `--help` answers at once. A fault that a
user can mend is told in its own words, on standard error, and ends with exit code 2; Ctrl-C and
SIGTERM release what runs, save the last finished step, and end with 130 (a second Ctrl-C leaves at
once).
"""

import os
import sys
from collections.abc import Sequence

from rich.console import Console

from agentrl.cli.app import app, refuse_hydra_options
from agentrl.cli.process import (
    exit_code,
    import_from_here,
    is_one_of_many,
    leave_rank,
    name_rank_in_logs,
    rank_name,
    stop_cleanly_on_sigterm,
)
from agentrl.errors import AgentRLError, is_out_of_memory
from agentrl.trainer.process_exit import end_without_waiting, report_silent_exit

__all__ = ["app", "leave_rank", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors that a user can mend become one message and exit code 2.

    Args:
        arguments: Of the command; None: those of the process.

    Raises:
        SystemExit: always, with the exit code.
    """
    import_from_here()
    stop_cleanly_on_sigterm()
    name_rank_in_logs()
    if arguments is None:
        report_silent_exit()
    # OpenMP's threads otherwise spin while they wait, at the cost of whoever shares the cores: the
    # engine's thread, tools, other users. It is read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _run(arguments)
    except BaseException as end:
        if is_one_of_many():
            leave_rank(end)
        if arguments is None:
            end_without_waiting(exit_code(end))
        raise


def _run(arguments: Sequence[str] | None) -> None:
    try:
        refuse_hydra_options(sys.argv[1:] if arguments is None else arguments)
        app(args=arguments, prog_name="agentrl")
    except (AgentRLError, OSError) as error:
        _tell(error)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _tell(AgentRLError(f"memory ran out: {error}", expected="a smaller model, or more memory"))
        sys.exit(2)


def _tell(error: Exception) -> None:
    console = Console(stderr=True)
    if isinstance(error, OSError) and error.filename is not None:
        error = AgentRLError(error.strerror or type(error).__name__, path=error.filename)
    whose = f"{rank_name()}: " if is_one_of_many() else ""
    console.print(
        f"{whose}error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
    )
