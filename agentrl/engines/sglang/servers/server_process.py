"""Run one local SGLang server: `python -m agentrl.engines.sglang.servers.server_process PARENT`.

PARENT is the id of the process that starts the server; the server ends when that process ends. The
standard input holds the arguments of SGLang's `ServerArgs` as JSON, because every user of the
machine can read a command line.
"""
# pyright: reportMissingImports=false

import ctypes
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    """Be a server until somebody ends it."""
    end_with(int(arguments[0]))
    server_arguments = json.load(sys.stdin)
    warnings.simplefilter("ignore")  # of kernels that other devices have
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**server_arguments))


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; SGLang's processes end with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
