"""The command that keeps servers running for other runs: `serve`."""

import sys
from typing import Annotated

import typer
from rich.markup import escape

from agentrl.cli.app import Overrides, RunFile, app
from agentrl.trainer.process_exit import importing

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
