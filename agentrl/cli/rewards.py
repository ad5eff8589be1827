"""Commands on rewards: `reward rescore`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentrl.cli.app import Overrides, reward_app
from agentrl.trainer.process_exit import importing


@reward_app.command("rescore")
def reward_rescore(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Saved rollouts, as JSONL.", show_default=False),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A run file, for its section reward.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A new file for the rollouts with new rewards.", show_default=False),
    ] = None,
) -> None:
    """Score saved rollouts anew, without generating anything.

    Exits with 1 where nothing could be scored.
    """
    with importing():
        from agentrl.commands.rescore import rescore_from_file

    changes = rescore_from_file(file, config, overrides or [], Console(), out=out)
    raise typer.Exit(int(not any(change.new for change in changes.values())))
