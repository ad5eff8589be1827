"""Commands that look before a run is paid for: `doctor`, `config`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentrl.cli.app import Overrides, RunFile, app, config_app
from agentrl.commands.run_file import read_run_file
from agentrl.config import Purpose
from agentrl.trainer.process_exit import importing

_DOCTOR_HELP = (
    "Look at everything that a run stands on, before it is paid for.\n\n"
    "Versions, devices, the run file, tools, tokenizer, chat template, data; then the engine: a "
    "rollout of some rows, its log-probabilities against the trainer's, a weight sync. Leaves no "
    "file but what the run file prepares, and exits with 1 where it finds a fault."
)


@app.command(help=_DOCTOR_HELP)
def doctor(run_file: RunFile, overrides: Overrides = None) -> None:
    """Look at everything that a run stands on, before it is paid for."""
    with importing():
        from agentrl.doctor.command import examine
        from agentrl.doctor.report import Verdict

    rows = examine(run_file, overrides or [], Console())
    raise typer.Exit(int(any(row.verdict is Verdict.FAIL for row in rows)))


@config_app.command("check")
def config_check(run_file: RunFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration, the batch arithmetic, and what the template can carry."""
    file = read_run_file(run_file, overrides or [], Purpose.TRAIN)
    with importing():
        from agentrl.commands.run import explain_config

    explain_config(file, Console())


@config_app.command("from-verl")
def config_from_verl(
    run_file: RunFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write to this file instead of printing.", show_default=False),
    ] = None,
) -> None:
    """Write a file in verl's key tree anew, with our keys, and what became of each as a comment."""
    from agentrl.config.explain import convert_from_verl

    text = convert_from_verl(run_file, overrides or [])
    if out is None:
        return typer.echo(text, nl=False)
    out.write_text(text, encoding="utf-8")
    return typer.echo(f"written: {out}")
