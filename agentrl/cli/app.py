"""The application that the commands belong to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import agentrl
from agentrl.errors import ConfigError
from agentrl.trainer.process_exit import say_interrupted


class Commands(TyperGroup):
    """The commands; one that Ctrl-C has ended says so, however early it was."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            say_interrupted(*map(str, stop.args))
            raise


app = typer.Typer(
    name="agentrl",
    cls=Commands,
    help="Train language-model agents with reinforcement learning over many turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
prepare_app = typer.Typer(help="Make datasets and indices.", no_args_is_help=True)
config_app = typer.Typer(help="Look at run files.", no_args_is_help=True)
reward_app = typer.Typer(help="Look at rewards.", no_args_is_help=True)
app.add_typer(prepare_app, name="prepare")
app.add_typer(config_app, name="config")
app.add_typer(reward_app, name="reward")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentrl {agentrl.__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Hold the options of `agentrl` itself; typer calls it before any command."""


RunFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A YAML run file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys of the file to replace: rollout.n=4 data.seed=1.",
        show_default=False,
    ),
]
OutDir = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Folder to write.", show_default=False)
]

_HYDRA_OPTIONS = ("--config-path", "--config-dir", "--config-name", "--cfg")


def refuse_hydra_options(arguments: Sequence[str]) -> None:
    """Refuse Hydra's options, by which verl's scripts name their run file.

    Raises:
        ConfigError: for such an option, with the command to use instead.
    """
    values: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if name in _HYDRA_OPTIONS:
            following = arguments[place + 1] if place + 1 < len(arguments) else ""
            values[name] = value if has_value else following
    if not values:
        return
    folder = values.get("--config-path") or values.get("--config-dir") or "."
    file = Path(folder) / Path(values.get("--config-name") or "FILE").with_suffix(".yaml")
    raise ConfigError(
        f"{', '.join(values)}: agentrl takes the path of the run file and composes no files",
        expected=f"agentrl {arguments[0]} {file} KEY=VALUE ...; an empty file if every key is on "
        "the command line",
    )
