"""The application that the commands belong to."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import agentrl
from agentrl.trainer.leaving import say_interrupted


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
