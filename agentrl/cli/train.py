"""Commands that run the loop, or a part of it: `train`, `sft`, `rollout`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from agentrl.cli.app import Overrides, RunFile, app
from agentrl.commands.run_file import read_run_file
from agentrl.config import Purpose
from agentrl.trainer.process_exit import importing

_TRAIN_HELP = (
    "Train a policy as a run file says.\n\n"
    "What its `prepare` section names and is not there yet (problems, a small policy, its warm-up) "
    "is made first. A run that was stopped goes on from its last complete checkpoint.\n\n"
    "On several devices: torchrun --nproc-per-node 2 -m agentrl train FILE"
)
_ROLLOUT_HELP = (
    "Show whole conversations token by token, with mask and rewards, without training.\n\n"
    "What the run file prepares is made first. To try tools out without a model's whims: "
    "rollout.engine.name=scripted 'rollout.engine.scripted.answers=[first turn, second turn]'"
)


@app.command(help=_TRAIN_HELP)
def train(run_file: RunFile, overrides: Overrides = None) -> None:
    """Train a policy."""
    file = read_run_file(run_file, overrides or [], Purpose.TRAIN)
    with importing():
        from agentrl.commands.run import train_from_file

    train_from_file(file)


@app.command()
def sft(run_file: RunFile, overrides: Overrides = None) -> None:
    """Run the supervised warm-up of a run file (prepare.sft), and what it needs before it."""
    file = read_run_file(run_file, overrides or [], Purpose.SFT)
    with importing():
        from agentrl.commands.run import sft_from_file

    sft_from_file(file)


@app.command(help=escape(_ROLLOUT_HELP))
def rollout(
    run_file: RunFile,
    overrides: Overrides = None,
    num: Annotated[int, typer.Option(help="Prompts to roll out.", min=1)] = 2,
    samples: Annotated[int, typer.Option(help="Conversations for each prompt.", min=1)] = 1,
    split: Annotated[str, typer.Option(help="train, or the name of a validation set.")] = "train",
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Sample as validation does (rollout.val_kwargs).")
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Add a table of every token and its probability.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also save the rollouts, with whole tracebacks, to this JSONL file.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show whole conversations without training."""
    file = read_run_file(run_file, overrides or [], Purpose.ROLLOUT)
    with importing():
        from agentrl.commands.run import RolloutOptions, rollout_from_file

    options = RolloutOptions(
        num=num, samples=samples, split=split, greedy=greedy, tokens=tokens, out=out
    )
    rollout_from_file(file, options, Console())
