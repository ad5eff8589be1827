"""The application that the commands belong to."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

import agentrl
from agentrl.commands.run_file import read_run_file
from agentrl.config import Purpose
from agentrl.errors import ConfigError
from agentrl.trainer.process_exit import importing, say_interrupted


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
        from agentrl.commands.train import train_from_file

    train_from_file(file)


@app.command()
def sft(run_file: RunFile, overrides: Overrides = None) -> None:
    """Run the supervised warm-up of a run file (prepare.sft), and what it needs before it."""
    file = read_run_file(run_file, overrides or [], Purpose.SFT)
    with importing():
        from agentrl.commands.train import sft_from_file

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
        from agentrl.commands.train import RolloutOptions, rollout_from_file

    options = RolloutOptions(
        num=num, samples=samples, split=split, greedy=greedy, tokens=tokens, out=out
    )
    rollout_from_file(file, options, Console())


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
        from agentrl.commands.train import explain_config

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


_SERVE_HELP = (
    "Start SGLang servers for a run file's model, and keep them running until Ctrl-C.\n\n"
    "They are started by the keys of rollout.engine.sglang, each with devices of its own. Training "
    "reaches them by the addresses that are printed: "
    "agentrl train FILE rollout.engine.name=sglang_server "
    "'rollout.engine.sglang_server.addresses=[http://127.0.0.1:30000]'"
)


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
        from agentrl.commands.serve import serve_from_file
        from agentrl.engines.sglang.servers.launch import ServeOptions

    options = ServeOptions(num=num, host=host, port=port, max_restarts=max_restarts)
    serve_from_file(run_file, overrides or [], options, say=_say)


def _say(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()


@prepare_app.command("arithmetic")
def prepare_arithmetic(
    out_dir: OutDir,
    seed: Annotated[int, typer.Option(help="Other seeds make other problems.")] = 0,
    num_train: Annotated[int, typer.Option(help="Training problems.", min=1)] = 2048,
    num_val: Annotated[int, typer.Option(help="Problems of each validation set.", min=1)] = 256,
    num_demos: Annotated[int, typer.Option(help="Conversations for a warm-up.", min=0)] = 16000,
) -> None:
    """Make word problems of one to three steps in the format of GSM8K, and demonstrations."""
    from agentrl.config.schema.prepare import ArithmeticConfig
    from agentrl.quickstart.arithmetic import prepare_arithmetic as prepare

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
    from agentrl.config.schema.prepare import Gsm8kConfig
    from agentrl.data.prepare.gsm8k import prepare_gsm8k as prepare

    files = prepare(Gsm8kConfig(out_dir=out_dir, source_dir=source_dir, max_samples=max_samples))
    _list_files([files.train, files.test], made=files.made)


def _list_files(files: Sequence[Path], *, made: bool) -> None:
    for file in files:
        typer.echo(f"{'made' if made else 'there already'}: {file}")


@prepare_app.command("search-index")
def prepare_search_index(
    out_dir: OutDir,
    corpus: Annotated[
        Path,
        typer.Option(help="JSON lines of {id, contents} or {id, title, text}.", show_default=False),
    ],
    stopwords: Annotated[str, typer.Option(help="Language of the words left out, or none.")] = "en",
    k1: Annotated[float, typer.Option(help="How much further occurrences of a word count.")] = 1.5,
    b: Annotated[float, typer.Option(help="How much a long document counts for less.")] = 0.75,
) -> None:
    """Index a corpus for SearchTool with `retriever: bm25` (extra `search`)."""
    from agentrl.config.schema.prepare import SearchIndexConfig
    from agentrl.data.prepare.search_index import prepare_search_index as prepare
    from agentrl.plugins.keys import read_keys

    given = {"out_dir": out_dir, "corpus": corpus, "stopwords": stopwords, "k1": k1, "b": b}
    config = read_keys(SearchIndexConfig, given, key="prepare search-index")
    files = prepare(config)
    _list_files([files.index_dir], made=files.made)
    typer.echo(f"{files.num_documents:,} documents")
