"""The command line: `agentrl train`, `sft`, `prepare`, `rollout`, `serve`, `doctor`, `config`.

Nothing heavy is imported before a command runs, so that `--help` answers at once. A fault that a
user can mend is told in its own words, on standard error, and ends with exit code 2; Ctrl-C and
SIGTERM release what runs, save the last finished step, and end with 130 (a second Ctrl-C leaves at
once).
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from agentrl.errors import AgentRLError, is_out_of_memory
from agentrl.trainer.leaving import end_process, importing, say_interrupted

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
_DOCTOR_HELP = (
    "Look at everything that a run stands on, before it is paid for.\n\n"
    "Versions, devices, the run file, tools, tokenizer, chat template, data; then the engine: a "
    "rollout of some rows, its log-probabilities against the trainer's, a weight sync. Leaves no "
    "file but what the run file prepares, and exits with 1 where it finds a fault."
)

_SERVE_HELP = (
    "Start SGLang servers for a run file's model, and keep them running until Ctrl-C.\n\n"
    "They are started by the keys of rollout.engine.sglang, each with devices of its own. Training "
    "reaches them by the addresses that are printed: "
    "agentrl train FILE rollout.engine.name=sglang_server "
    "'rollout.engine.sglang_server.addresses=[http://127.0.0.1:30000]'"
)


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
prepare_app = typer.Typer(help="Make datasets.", no_args_is_help=True)
config_app = typer.Typer(help="Look at run files.", no_args_is_help=True)
app.add_typer(prepare_app, name="prepare")
app.add_typer(config_app, name="config")

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
    # OpenMP's threads otherwise spin while they wait, at the cost of whoever shares the cores: the
    # engine's thread, tools, other users. It is read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _run(arguments)
    except BaseException as end:
        if is_one_of_many():
            leave_rank(end)
        raise


def _run(arguments: Sequence[str] | None) -> None:
    try:
        app(args=arguments, prog_name="agentrl")
    except (AgentRLError, OSError) as error:
        _tell(error)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _tell(AgentRLError(f"memory ran out: {error}", expected="a smaller model, or more memory"))
        sys.exit(2)


def is_one_of_many() -> bool:
    """Whether torchrun, or what does as it does, started this process among others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def name_rank_in_logs() -> None:
    """Let each line of a log say whose it is, where several ranks share a terminal."""
    if is_one_of_many():
        logging.basicConfig(format=f"{_rank()}: %(message)s")


def _rank() -> str:
    return f"rank {os.environ.get('RANK', '?')}"


def leave_rank(end: BaseException) -> NoReturn:
    """Leave a rank that is done or has failed, without taking the interpreter down.

    gloo's threads let go of the last exchange's tensors a moment after it is over. For that they
    need Python, and where they find it being taken down they abort the process: a run that
    succeeded would end as one that crashed. And the others learn of a failure by the end of this
    process alone, so it must not wait for anything.
    """
    code = 1
    if isinstance(end, SystemExit):
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    else:
        traceback.print_exception(end)
    logging.shutdown()
    end_process(code)


def import_from_here() -> None:
    """Let class paths of a run file lead to modules of the working directory.

    `python -m agentrl` finds them there by itself; the installed command would not. The directory
    comes last, so that none of its files can stand in for a library.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def stop_cleanly_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that what a scheduler ends is ended cleanly.

    This is for the time before the loop and after it, which hears both signals itself. Under
    torchrun SIGTERM keeps its meaning there: a rank that waits for the others could not answer.
    """
    if not is_one_of_many():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> None:
    # A shell starts background jobs with SIGINT ignored; SIGTERM must reach them all the same.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def _tell(error: Exception) -> None:
    console = Console(stderr=True)
    if isinstance(error, OSError) and error.filename is not None:
        error = AgentRLError(error.strerror or type(error).__name__, path=error.filename)
    whose = f"{_rank()}: " if is_one_of_many() else ""
    console.print(
        f"{whose}error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentrl {version('agentrl')}")
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


@app.command(help=_TRAIN_HELP)
def train(run_file: RunFile, overrides: Overrides = None) -> None:
    """Train a policy."""
    with importing():
        from agentrl.trainer.run import train_from_file

    train_from_file(run_file, overrides or [])


@app.command()
def sft(run_file: RunFile, overrides: Overrides = None) -> None:
    """Run the supervised warm-up of a run file (prepare.sft), and what it needs before it."""
    with importing():
        from agentrl.trainer.run import sft_from_file

    sft_from_file(run_file, overrides or [])


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
        typer.Option(help="Also save the rollouts to this JSONL file.", show_default=False),
    ] = None,
) -> None:
    """Show whole conversations without training."""
    with importing():
        from agentrl.trainer.run import RolloutOptions, rollout_from_file

    options = RolloutOptions(
        num=num, samples=samples, split=split, greedy=greedy, tokens=tokens, out=out
    )
    rollout_from_file(run_file, overrides or [], options, Console())


@app.command(help=_DOCTOR_HELP)
def doctor(run_file: RunFile, overrides: Overrides = None) -> None:
    """Look at everything that a run stands on, before it is paid for."""
    with importing():
        from agentrl.trainer.doctor.command import examine
        from agentrl.trainer.doctor.records import Verdict

    rows = examine(run_file, overrides or [], Console())
    raise typer.Exit(int(any(row.verdict is Verdict.FAIL for row in rows)))


@app.command(help=escape(_SERVE_HELP))
def serve(
    run_file: RunFile,
    overrides: Overrides = None,
    num: Annotated[int, typer.Option(help="Servers to start.", min=1)] = 1,
    host: Annotated[str, typer.Option(help="Address that they listen at.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            help="Port of the first; the others follow. Without it free ones are chosen.",
            min=1,
            max=65535,
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="How often a server that dies is started again.", min=0)
    ] = 3,
) -> None:
    """Start SGLang servers."""
    with importing():
        from agentrl.engines.sglang.launch import ServeOptions
        from agentrl.trainer.serve import serve_from_file

    options = ServeOptions(num=num, host=host, port=port, max_restarts=max_restarts)
    serve_from_file(run_file, overrides or [], options, say=_say)


def _say(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()


@config_app.command("check")
def config_check(run_file: RunFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration, the batch arithmetic, and what the template can carry."""
    with importing():
        from agentrl.trainer.run import explain_config

    explain_config(run_file, overrides or [], Console())


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
    from agentrl.config.convert import convert_from_verl

    text = convert_from_verl(run_file, overrides or [])
    if out is None:
        return typer.echo(text, nl=False)
    out.write_text(text, encoding="utf-8")
    return typer.echo(f"written: {out}")


@prepare_app.command("arithmetic")
def prepare_arithmetic(
    out_dir: OutDir,
    seed: Annotated[int, typer.Option(help="Other seeds make other problems.")] = 0,
    num_train: Annotated[int, typer.Option(help="Training problems.", min=1)] = 2048,
    num_val: Annotated[int, typer.Option(help="Problems of each validation set.", min=1)] = 256,
    num_demos: Annotated[int, typer.Option(help="Conversations for a warm-up.", min=0)] = 16000,
) -> None:
    """Make word problems of one to three steps in the format of GSM8K, and demonstrations."""
    from agentrl.config.schema import ArithmeticConfig
    from agentrl.data.prepare import prepare_arithmetic as prepare

    files = prepare(
        ArithmeticConfig(
            out_dir=out_dir, seed=seed, num_train=num_train, num_val=num_val, num_demos=num_demos
        )
    )
    _list_files([files.train, files.val, files.val_unseen, files.demos], made=files.made)


@prepare_app.command("gsm8k")
def prepare_gsm8k(
    out_dir: OutDir,
    source_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with train.jsonl and test.jsonl; without it they are downloaded.",
            show_default=False,
        ),
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(help="Only so many rows of each.", min=1, show_default=False)
    ] = None,
) -> None:
    """Turn the real GSM8K into rows with tools and an interaction."""
    from agentrl.config.schema import Gsm8kConfig
    from agentrl.data.prepare import prepare_gsm8k as prepare

    files = prepare(Gsm8kConfig(out_dir=out_dir, source_dir=source_dir, max_samples=max_samples))
    _list_files([files.train, files.test], made=files.made)


def _list_files(files: Sequence[Path], *, made: bool) -> None:
    for file in files:
        typer.echo(f"{'made' if made else 'there already'}: {file}")
