"""The command line: `agentrl train`, `sft`, `prepare`, `rollout`, `config`.

Nothing heavy is imported before a command runs, so that `--help` answers at once. A fault that a
user can mend is told in its own words and ends with exit code 2; Ctrl-C ends with 130.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentrl.errors import AgentRLError

app = typer.Typer(
    name="agentrl",
    help="Train language-model agents with reinforcement learning over many turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
prepare_app = typer.Typer(help="Make datasets and small policies.", no_args_is_help=True)
config_app = typer.Typer(help="Look at run files.", no_args_is_help=True)
app.add_typer(prepare_app, name="prepare")
app.add_typer(config_app, name="config")

RunFile = Annotated[Path, typer.Argument(help="A YAML run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides, such as rollout.n=4.", show_default=False),
]


def main() -> None:
    """Run the command line; errors that a user can mend become one message and exit code 2."""
    try:
        app()
    except AgentRLError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", markup=False)
        sys.exit(130)


@app.command()
def train(run_file: RunFile, overrides: Overrides = None) -> None:
    """Train a policy as a run file says; what the file's `prepare` names is made first."""
    from agentrl.trainer.run import train_from_file

    train_from_file(run_file, overrides or [])


@app.command()
def sft(run_file: RunFile, overrides: Overrides = None) -> None:
    """Run the supervised warm-up of a run file (its `prepare.sft`)."""
    from agentrl.trainer.run import sft_from_file

    sft_from_file(run_file, overrides or [])


@app.command()
def rollout(
    run_file: RunFile,
    overrides: Overrides = None,
    num: Annotated[int, typer.Option(help="Prompts to roll out.", min=1)] = 2,
    split: Annotated[str, typer.Option(help="train, or the name of a validation set.")] = "train",
    greedy: Annotated[bool, typer.Option(help="Sample as validation does.")] = False,
    tokens: Annotated[bool, typer.Option(help="Add a table of every token.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also save the rollouts as JSONL.")] = None,
) -> None:
    """Show whole conversations token by token, with mask and rewards, without training."""
    from agentrl.trainer.run import rollout_from_file

    rollout_from_file(
        run_file, overrides or [], num=num, split=split, greedy=greedy, tokens=tokens, out=out
    )
