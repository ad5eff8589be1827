"""The commands and their options. Each command imports what it needs when it runs."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

import agentrl
from agentrl.commands.run_file import read_run_file, uses_cluster
from agentrl.config import Purpose
from agentrl.errors import ConfigError
from agentrl.trainer.process_exit import importing, print_interrupted


class Commands(TyperGroup):
    """The group of commands; prints a line if Ctrl-C ends one of them."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            print_interrupted(*map(str, stop.args))
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
config_app = typer.Typer(help="Check and convert run files.", no_args_is_help=True)
reward_app = typer.Typer(help="Check rewards.", no_args_is_help=True)
app.add_typer(prepare_app, name="prepare")
app.add_typer(config_app, name="config")
app.add_typer(reward_app, name="reward")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"agentrl {agentrl.__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            metavar="",
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Define the options of `agentrl` itself; typer calls this before every command."""


def _argument(metavar: str, text: str) -> Any:
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def _option(text: str, **limits: Any) -> Any:
    """Make an option that does not show its default."""
    return typer.Option(help=text, show_default=False, **limits)


def _flag(name: str, text: str) -> Any:
    """Make an option without a value; the help shows no type for it."""
    return typer.Option(name, help=text, metavar="")


RunFile = Annotated[Path, _argument("FILE", "A YAML run file.")]
Overrides = Annotated[
    list[str] | None,
    _argument("KEY=VALUE", "Keys of the file to replace: rollout.n=4 data.seed=1."),
]
OutDir = Annotated[Path, _argument("FOLDER", "Folder to write.")]

_HYDRA_OPTIONS = ("--config-path", "--config-dir", "--config-name", "--cfg")


def refuse_hydra_options(arguments: Sequence[str]) -> None:
    """Refuse Hydra's options, with which verl's scripts name their run file.

    Raises:
        ConfigError: for such an option, with the command to use instead.
    """
    values: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if name in _HYDRA_OPTIONS:
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
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


# Runs.

_TRAIN_HELP = (
    "Train a policy as a run file says.\n\n"
    "What its `prepare` section names and is missing (problems, a small policy, its warm-up) is "
    "made first. A run that was stopped resumes from its last complete checkpoint.\n\n"
    "On several devices: trainer.n_gpus_per_node=8 trainer.nnodes=4 (docs/cluster.md), or"
    " torchrun --nproc-per-node 2 -m agentrl train FILE"
)
_ROLLOUT_HELP = (
    "Show whole conversations token by token, with mask and rewards, without training.\n\n"
    "What the run file prepares is made first. To test tools without a model: "
    "rollout.engine.name=scripted 'rollout.engine.scripted.answers=[first turn, second turn]'"
)


@app.command(help=_TRAIN_HELP)
def train(run_file: RunFile, overrides: Overrides = None) -> None:
    """Train a policy."""
    file = read_run_file(run_file, overrides or [], Purpose.TRAIN)
    if uses_cluster(file.config):
        from agentrl.commands.train_on_cluster import train_on_cluster

        train_on_cluster(file)
        return
    with importing():
        from agentrl.commands.train import train_from_file

    train_from_file(file)


@app.command()
def sft(run_file: RunFile, overrides: Overrides = None) -> None:
    """Run the supervised warm-up of a run file (prepare.sft), and make what it needs first."""
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
        bool, _flag("--greedy", "Sample as validation does (rollout.val_kwargs).")
    ] = False,
    tokens: Annotated[
        bool, _flag("--tokens", "Add a table of every token and its probability.")
    ] = False,
    out: Annotated[
        Path | None,
        _option("Also save the rollouts, with whole tracebacks, to this JSONL file."),
    ] = None,
) -> None:
    """Show whole conversations without training."""
    file = read_run_file(run_file, overrides or [], Purpose.ROLLOUT)
    with importing():
        from agentrl.commands.rollout import RolloutOptions, rollout_from_file

    options = RolloutOptions(
        num=num, samples=samples, split=split, greedy=greedy, tokens=tokens, out=out
    )
    rollout_from_file(file, options, Console())


@reward_app.command("rescore")
def reward_rescore(
    file: Annotated[Path, _argument("FILE", "Saved rollouts, as JSONL.")],
    overrides: Overrides = None,
    config: Annotated[Path | None, _option("A run file, for its section reward.")] = None,
    out: Annotated[Path | None, _option("A new file for the rollouts with new rewards.")] = None,
) -> None:
    """Score saved rollouts again, without generating anything.

    Exits with 1 if nothing could be scored.
    """
    with importing():
        from agentrl.commands.rescore import rescore_from_file

    changes = rescore_from_file(file, config, overrides or [], Console(), out=out)
    raise typer.Exit(int(not any(change.new for change in changes.values())))


_STATUS_HELP = (
    "Show what a run does now: its step, and on Ray its pools, nodes, processes, their load and"
    " last heartbeat.\n\n"
    "Reads the run's folder, so it works on every machine that sees it; it needs neither Ray nor a"
    " free device. Exit code: 0 if the run is running or finished, 1 if it was stopped or failed, 2"
    " for a wrong folder, 3 if its process is dead."
)


@app.command(help=_STATUS_HELP)
def status(
    folder: Annotated[
        Path | None, _argument("FOLDER", "trainer.default_local_dir; default: the newest of runs/.")
    ] = None,
    as_json: Annotated[bool, _flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Show what a run does now."""
    from agentrl.commands.status import show_status

    raise typer.Exit(show_status(folder, as_json=as_json, say=typer.echo))


_VIEW_HELP = (
    "Show runs on a local web page, until Ctrl-C: curves, steps, trajectories and their tokens.\n\n"
    "Prints an address that only this machine reaches. --export writes the pages as files that "
    "open from disk, --terminal prints the lists."
)


@app.command(help=_VIEW_HELP)
def view(
    folders: Annotated[
        list[Path], _argument("RUN", "Folders of runs (trainer.default_local_dir).")
    ],
    port: Annotated[
        int | None, _option("Port of the web page. Default: a free one.", min=0, max=65535)
    ] = None,
    export: Annotated[Path | None, _option("Write the pages to this new folder.")] = None,
    terminal: Annotated[bool, _flag("--terminal", "Print the lists.")] = False,
    step: Annotated[
        list[int] | None,
        _option(
            "Step to export (repeatable) or print; a second one is compared with it. "
            "Default: the last one."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        _option("Trajectories of a file to export (1000) or print (20).", min=1),
    ] = None,
    sort: Annotated[
        str,
        _option(
            "Order of --terminal: id, reward, tokens, turns, seconds, calls, tool_seconds, step, "
            "end, source or trained; -reward reverses it. Default: as saved."
        ),
    ] = "",
    end: Annotated[str, _option("Only this end, in --terminal.")] = "",
    tool: Annotated[str, _option("Only with a call of this tool, in --terminal.")] = "",
    outcome: Annotated[
        str, _option("Only with a call of this outcome (of --tool, if given), in --terminal.")
    ] = "",
    source: Annotated[str, _option("Only of this data source, in --terminal.")] = "",
    min_reward: Annotated[float | None, _option("Least reward, in --terminal.")] = None,
    max_reward: Annotated[float | None, _option("Only smaller rewards, in --terminal.")] = None,
    text: Annotated[str, _option("Only with this text, in --terminal.")] = "",
    request: Annotated[
        str, _option("Print the trajectory of this request id, in --terminal.")
    ] = "",
) -> None:
    """Show runs."""
    from agentrl.commands.view import ViewOptions, view_runs
    from agentrl.viewer.queries import Filters

    def say(line: str) -> None:
        typer.echo(line)
        sys.stdout.flush()

    options = ViewOptions(
        port=port,
        export=export,
        steps=step or (),
        limit=limit,
        is_terminal=terminal,
        request=request,
        filters=Filters(
            sort=sort,
            end=end,
            tool=tool,
            outcome=outcome,
            source=source,
            text=text,
            min_reward=-math.inf if min_reward is None else min_reward,
            max_reward=math.inf if max_reward is None else max_reward,
        ),
    )
    view_runs(folders, options, say)


_AUDIT_HELP = (
    "Compute a run's account again from what it saved.\n\n"
    "Digests, tokens, masks, rewards, advantages, weight versions, the order of the data and the "
    "metrics of each step, and the weights of checkpoints. Needs saved rollouts "
    "(trainer.rollout_data_dir). Exits with 1 if something does not follow from the rows."
)


@app.command(help=_AUDIT_HELP)
def audit(
    folder: Annotated[Path, _argument("FOLDER", "trainer.default_local_dir of the run.")],
    resample: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Compute the log-probabilities of N random turns again, with their weights.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Chooses the turns of --resample.")] = 0,
) -> None:
    """Compute a run's account again from what it saved."""
    with importing():
        from agentrl.commands.audit.report import audit as audit_run

    found = audit_run(folder, Console(), num_resampled=resample, seed=seed)
    raise typer.Exit(int(found > 0))


_PUSH_HELP = (
    "Publish the exported policy of a run on the Hugging Face Hub, with its model card.\n\n"
    "Needs a token that may write: `hf auth login`, or HF_TOKEN. HF_ENDPOINT names another Hub."
)


@app.command(help=_PUSH_HELP)
def push(
    folder: Annotated[Path, _argument("FOLDER", "Folder of a run, or of a Hugging Face model.")],
    repo: Annotated[str, _argument("REPO", "owner/name; the repository is made if missing.")],
    private: Annotated[bool, _flag("--private", "Make a new repository private.")] = False,
    revision: Annotated[str | None, _option("Branch to push to, made if missing.")] = None,
    message: Annotated[str | None, _option("Message of the commit.")] = None,
) -> None:
    """Publish the exported policy of a run."""
    with importing():
        from agentrl.commands.push import PushOptions
        from agentrl.commands.push import push as push_model

    options = PushOptions(private=private, revision=revision, message=message)
    typer.echo(f"pushed: {push_model(folder, repo, options, typer.echo)}")


# Checks.

_DOCTOR_HELP = (
    "Check everything that a run depends on, before it is started.\n\n"
    "Versions, devices, the run file, tools, tokenizer, chat template, data; then the engine: a "
    "rollout of some rows, its log-probabilities against the trainer's, a weight sync. Leaves no "
    "files except what the run file prepares, and exits with 1 if it finds a fault."
)


@app.command(help=_DOCTOR_HELP)
def doctor(run_file: RunFile, overrides: Overrides = None) -> None:
    """Check everything that a run depends on."""
    with importing():
        from agentrl.doctor.command import examine
        from agentrl.doctor.report import Verdict

    rows = examine(run_file, overrides or [], Console())
    raise typer.Exit(int(any(row.verdict is Verdict.FAIL for row in rows)))


@config_app.command("check")
def config_check(run_file: RunFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration, batch arithmetic, and what the chat template supports."""
    file = read_run_file(run_file, overrides or [], Purpose.TRAIN, starts_now=False)
    with importing():
        from agentrl.commands.explain import explain_config

    explain_config(file, Console())


@config_app.command("from-verl")
def config_from_verl(
    run_file: RunFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, _option("Write to this file instead of printing.")] = None,
) -> None:
    """Convert a file in verl's key tree to agentrl's keys, with a comment on each key."""
    from agentrl.config.explain import convert_from_verl

    text = convert_from_verl(run_file, overrides or [])
    if out is None:
        return typer.echo(text, nl=False)
    out.write_text(text, encoding="utf-8")
    return typer.echo(f"written: {out}")


# Servers.

_SERVE_HELP = (
    "Start SGLang servers for a run file's model, and keep them running until Ctrl-C.\n\n"
    "They use the keys of rollout.engine.sglang; each has devices of its own. Training connects to "
    "them by the addresses that are printed: "
    "agentrl train FILE rollout.engine.name=sglang_server "
    "'rollout.engine.sglang_server.addresses=[http://127.0.0.1:30000]'"
)


@app.command(help=escape(_SERVE_HELP))
def serve(
    run_file: RunFile,
    overrides: Overrides = None,
    num: Annotated[int, typer.Option(help="Servers to start.", min=1)] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        _option("Port of the first server, others follow; default: free ports.", min=1, max=65535),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="How often a server that dies is restarted.", min=0)
    ] = 3,
) -> None:
    """Start SGLang servers."""
    with importing():
        from agentrl.commands.serve import serve_from_file
        from agentrl.engines.sglang.servers.launch import ServeOptions

    def say(text: str) -> None:
        typer.echo(text)
        sys.stdout.flush()

    options = ServeOptions(num=num, host=host, port=port, max_restarts=max_restarts)
    serve_from_file(run_file, overrides or [], options, say=say)


_GATEWAY_HELP = (
    "Serve a run file's policy to agents that you start by hand, until Ctrl-C.\n\n"
    "Prints base URLs (OpenAI chat completions and responses, Anthropic messages) and the key of a "
    "session. POST /sessions opens another one, DELETE /sessions/KEY ends one; both need the admin "
    "key that is printed. Sessions are saved as rollouts when they end."
)


@app.command(help=_GATEWAY_HELP)
def gateway(
    run_file: RunFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        _option("JSONL file for ended sessions; default: sessions.jsonl in the run's folder."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65535)] = 0,
) -> None:
    """Serve the policy to agents."""
    file = read_run_file(run_file, overrides or [], Purpose.ROLLOUT)
    with importing():
        from agentrl.commands.gateway import GatewayOptions, gateway_from_file

    def say(text: str) -> None:
        typer.echo(text)
        sys.stdout.flush()

    gateway_from_file(file, GatewayOptions(out=out, host=host, port=port), say=say)


# Data.


@prepare_app.command("arithmetic")
def prepare_arithmetic(
    out_dir: OutDir,
    seed: Annotated[int, typer.Option(help="Another seed makes other problems.")] = 0,
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
        _option("Folder with train.jsonl and test.jsonl; without it they are downloaded."),
    ] = None,
    max_samples: Annotated[int | None, _option("Use only so many rows of each.", min=1)] = None,
) -> None:
    """Turn the real GSM8K into rows with tools and an interaction."""
    from agentrl.config.schema.prepare import Gsm8kConfig
    from agentrl.data.prepare.gsm8k import prepare_gsm8k as prepare

    files = prepare(Gsm8kConfig(out_dir=out_dir, source_dir=source_dir, max_samples=max_samples))
    _list_files([files.train, files.test], made=files.made)


@prepare_app.command("geometry3k")
def prepare_geometry3k(
    out_dir: OutDir,
    source_dir: Annotated[
        Path | None,
        _option("Folder with train*.parquet and test*.parquet; without it they are downloaded."),
    ] = None,
    max_samples: Annotated[int | None, _option("Use only so many rows of each.", min=1)] = None,
) -> None:
    """Turn the real Geometry3K, problems with a picture, into rows with a tool."""
    from agentrl.config.schema.prepare import Geometry3kConfig
    from agentrl.data.prepare.geometry3k import prepare_geometry3k as prepare

    config = Geometry3kConfig(out_dir=out_dir, source_dir=source_dir, max_samples=max_samples)
    files = prepare(config)
    _list_files([files.train, files.test], made=files.made)


@prepare_app.command("search-index")
def prepare_search_index(
    out_dir: OutDir,
    corpus: Annotated[Path, _option("JSON lines of {id, contents} or {id, title, text}.")],
    stopwords: Annotated[str, typer.Option(help="Language of the words left out, or none.")] = "en",
    k1: Annotated[float, typer.Option(help="Weight of further occurrences of a word.")] = 1.5,
    b: Annotated[float, typer.Option(help="Penalty for long documents.")] = 0.75,
) -> None:
    """Index a corpus for SearchTool with `retriever: bm25` (extra `search`)."""
    from agentrl.config.schema.prepare import SearchIndexConfig
    from agentrl.data.prepare.search_index import prepare_search_index as prepare
    from agentrl.plugins.keys import read_keys
    from agentrl.progress import ProgressDisplay

    given = {"out_dir": out_dir, "corpus": corpus, "stopwords": stopwords, "k1": k1, "b": b}
    config = read_keys(SearchIndexConfig, given, key="prepare search-index")
    files = prepare(config, ProgressDisplay(Console()))
    _list_files([files.index_dir], made=files.made)
    typer.echo(f"{files.num_documents:,} documents")


def _list_files(files: Sequence[Path], *, made: bool) -> None:
    for file in files:
        typer.echo(f"{'made' if made else 'there already'}: {file}")
