"""`agentrl view`: show runs on a local web page, in the terminal, or as exported pages."""

import asyncio
import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.viewer.export import export_runs
from agentrl.viewer.queries import Filters, list_choices
from agentrl.viewer.runs import RunReader
from agentrl.viewer.server import ViewServer
from agentrl.viewer.terminal import print_lists, print_trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """What is shown, and how; the defaults serve a web page."""

    port: int | None = None
    """Of the web page. None or 0: a free one."""
    export: Path | None = None
    """A new folder for exported pages."""
    steps: Sequence[int] = ()
    """Steps to export; or the step to print, and one to compare it with. None: the last one."""
    limit: int | None = None
    """Trajectories of a file that are exported or printed."""
    is_terminal: bool = False
    filters: Filters = field(default_factory=Filters)
    """For the terminal."""
    request: str = ""
    """Id of the request that the terminal shows instead of lists."""


def view_runs(folders: Sequence[Path], options: ViewOptions, say: Callable[[str], None]) -> None:
    """Show runs until Ctrl-C, or export or print them.

    Args:
        folders: `trainer.default_local_dir` of each run.
        options: How they are shown.
        say: Prints a line.

    Raises:
        ConfigError: If a folder is not that of a run, or the options do not fit.
    """
    _check(options)
    runs = [RunReader(folder) for folder in folders]
    for run in runs:
        run.check()
    if options.is_terminal:
        _print(runs, options)
    elif options.export is not None:
        done = export_runs(runs, options.export, steps=options.steps, limit=options.limit or 1000)
        say(f"written: {options.export / 'index.html'}, {done.num_trajectories:,} trajectories")
        if done.num_left_out:
            say(f"left out: {done.num_left_out:,} trajectories; a larger --limit adds them")
    else:
        with suppress(KeyboardInterrupt):  # Ctrl-C is how a server ends
            asyncio.run(_serve(runs, options.port or 0, say))


def _print(runs: Sequence[RunReader], options: ViewOptions) -> None:
    console = Console(highlight=False)
    if options.request:
        print_trajectory(runs, options.request, console)
        return
    for step in options.steps:
        if not any(run.find_steps([step])[0] for run in runs):
            labels = [label for run in runs for label in run.find_files()]
            saved = sorted({int(label.rpartition("_")[2]) for label in labels})
            expected = f"one of {', '.join(map(str, saved))}" if saved else "saved rollouts"
            raise ConfigError(f"no rollouts of step {step}", expected=expected)
    files = [(run, run.find_steps(options.steps)[0]) for run in runs]
    choices = [list_choices(run, file) for run, file in files if file]
    for name in ("end", "tool", "outcome", "source"):
        if not (wanted := getattr(options.filters, name)):
            continue
        known = {one for of_file in choices for one in of_file[f"{name}s"]} - {""}
        is_known = wanted in known or any(  # the choices are only the most frequent ones
            Filters(**{name: wanted}).select(run.index(file)) for run, file in files if file
        )
        if choices and not is_known:
            expected = f"one of {', '.join(sorted(known))}" if known else f"no --{name}"
            raise ConfigError(f"no trajectory has the {name} {wanted!r}", expected=expected)
    limit = options.limit or 20
    print_lists(runs, options.filters, console, limit=limit, steps=options.steps)


def _check(options: ViewOptions) -> None:
    """Check that the options fit together."""
    if options.is_terminal and options.export is not None:
        raise ConfigError("--export and --terminal exclude each other", expected="one of them")
    chosen, is_exported = options.filters, options.export is not None
    given = [one.name for one in fields(chosen) if getattr(chosen, one.name) != one.default]
    for name in [*given, *(["request"] if options.request else [])]:
        if not options.is_terminal:
            name = name.replace("_", "-")
            raise ConfigError(f"--{name} needs --terminal", expected=f"--terminal, or no --{name}")
    if options.request and (given or options.steps or options.limit):
        raise ConfigError(
            "--request prints one trajectory", expected="no filters, --sort, --step or --limit"
        )
    for name, is_given in (("step", options.steps), ("limit", options.limit is not None)):
        if is_given and not (options.is_terminal or is_exported):
            raise ConfigError(
                f"--{name} needs --export or --terminal",
                expected=f"one of them, or no --{name}: the web page has all trajectories",
            )
    if options.port is not None and (options.is_terminal or is_exported):
        other = "--terminal" if options.is_terminal else "--export"
        raise ConfigError(
            f"--port does not work with {other}", expected="no --port: only the web page has one"
        )
    if options.is_terminal and len(options.steps) > 2:
        raise ConfigError("--terminal compares two steps", expected="at most two times --step")


async def _serve(runs: Sequence[RunReader], port: int, say: Callable[[str], None]) -> None:
    server = ViewServer(runs, port)
    try:
        await server.start()
    except OSError as error:
        is_in_use = error.errno == errno.EADDRINUSE
        reason = " is in use" if is_in_use else f": {error.strerror}"
        raise ConfigError(f"port {port}{reason}", expected="a free --port") from error
    try:
        say(f"{server.address}")
        say("Open this address in a browser on this machine. Ctrl-C ends the server.")
        await asyncio.Event().wait()
    finally:
        await server.close()
