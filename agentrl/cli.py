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
    from agentrl.trainer.run import RolloutOptions, rollout_from_file

    options = RolloutOptions(num=num, split=split, greedy=greedy, tokens=tokens, out=out)
    rollout_from_file(run_file, overrides or [], options, Console())


@config_app.command("check")
def config_check(run_file: RunFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration, the batch arithmetic, and what the template can carry."""
    from agentrl.trainer.run import explain_config

    explain_config(run_file, overrides or [], Console())


@prepare_app.command("arithmetic")
def prepare_arithmetic(
    out_dir: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Other seeds make other problems.")] = 0,
    num_train: Annotated[int, typer.Option(min=1)] = 2048,
    num_val: Annotated[int, typer.Option(min=1)] = 256,
    num_demos: Annotated[int, typer.Option(min=0)] = 16000,
) -> None:
    """Make word problems of one to three steps in the format of GSM8K."""
    from agentrl.config.schema import ArithmeticConfig
    from agentrl.data.prepare import prepare_arithmetic as prepare

    made = prepare(
        ArithmeticConfig(
            out_dir=out_dir, seed=seed, num_train=num_train, num_val=num_val, num_demos=num_demos
        )
    )
    for path in made:
        typer.echo(path)


@prepare_app.command("gsm8k")
def prepare_gsm8k(
    out_dir: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    source_dir: Annotated[
        Path | None, typer.Option(help="Folder with train.jsonl and test.jsonl; else the hub.")
    ] = None,
    max_samples: Annotated[int | None, typer.Option(help="Rows of each split.", min=1)] = None,
) -> None:
    """Turn the real GSM8K into rows with tools and an interaction."""
    from agentrl.config.schema import Gsm8kConfig
    from agentrl.data.prepare import prepare_gsm8k as prepare

    made = prepare(Gsm8kConfig(out_dir=out_dir, source_dir=source_dir, max_samples=max_samples))
    for path in made:
        typer.echo(path)
