"""`agentrl view`: show runs on a local web page, in the terminal, or as exported pages."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.viewer.export import export_runs
from agentrl.viewer.queries import Filters
from agentrl.viewer.runs import RunReader
from agentrl.viewer.server import ViewServer
from agentrl.viewer.terminal import print_lists


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """What is shown, and how; the defaults serve a web page."""

    port: int = 0
    """0: a free one."""
    export: Path | None = None
    """A new folder for exported pages."""
    steps: Sequence[int] = ()
    """Steps to export; or the step to print, and one to compare it with. None: the last one."""
    limit: int | None = None
    """Trajectories of a file that are exported or printed."""
    is_terminal: bool = False
    filters: Filters = field(default_factory=Filters)
    """For the terminal."""


def view_runs(folders: Sequence[Path], options: ViewOptions, say: Callable[[str], None]) -> None:
    """Show runs until Ctrl-C, or export or print them.

    Args:
        folders: `trainer.default_local_dir` of each run.
        options: How they are shown.
        say: Prints a line.

    Raises:
        ConfigError: If a folder is not that of a run, or the options do not fit.
    """
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
        asyncio.run(_serve(runs, options.port, say))


def _print(runs: Sequence[RunReader], options: ViewOptions) -> None:
    labels = sorted({label for run in runs for label in run.find_files()})
    chosen = ["", ""]
    for place, step in enumerate(options.steps[:2]):
        found = [label for label in labels if label.endswith(f"/step_{step:06d}")]
        if not found:
            raise ConfigError(f"no rollouts of step {step}", expected="--step of a run")
        chosen[place] = found[0]
    filters = replace(options.filters, file=chosen[0])
    console = Console(highlight=False)
    print_lists(runs, filters, console, limit=options.limit or 20, compared=chosen[1])


async def _serve(runs: Sequence[RunReader], port: int, say: Callable[[str], None]) -> None:
    server = ViewServer(runs, port)
    try:
        await server.start()
    except OSError as error:
        raise ConfigError(f"port {port}: {error.strerror}", expected="a free --port") from error
    try:
        say(f"{server.address}")
        say("Open this address in a browser on this machine. Ctrl-C ends the server.")
        await asyncio.Event().wait()
    finally:
        await server.close()
