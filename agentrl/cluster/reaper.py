"""The process that ends what a host leaves behind: its child processes, also after kill -9.

It waits for the end of the host. Then it kills every process of the host's process group, and every
process with the host's token in its environment, which may have started a session of its own.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

VARIABLE = "AGENTRL_HOST"
_ROUNDS = 50


def start(token: str) -> "subprocess.Popen[bytes]":
    """Start the process for this one.

    Args:
        token: The value of `VARIABLE` that the child processes of this process inherit.
    """
    with suppress(PermissionError):  # it may lead a session already
        os.setsid()
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    # The file is run, not imported: it needs no package, so the process stays small.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, token, str(os.getpid())],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def find_left(token: str, host: int) -> list[int]:
    """List the processes that a host has started and that still run."""
    wanted = f"{VARIABLE}={token}".encode()
    return [
        process
        for process in (int(name) for name in os.listdir("/proc") if name.isdecimal())
        if process not in (os.getpid(), host) and _belongs(process, wanted, host)
    ]


def _belongs(process: int, wanted: bytes, host: int) -> bool:
    with suppress(OSError):
        with open(f"/proc/{process}/stat", "rb") as file:
            # The name, in parentheses, may have spaces: state, parent, group, session follow it.
            state, _, group, session = file.read().rpartition(b")")[2].split()[:4]
        if state == b"Z":
            return False
        # A fork keeps the environment that its parent had when it was executed: without a token.
        if host in (int(group), int(session)):
            return True
        with open(f"/proc/{process}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    return False


def main(token: str, host: int) -> None:
    """Wait for the end of the host, then kill what it started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The pipe ends with the host, unless a fork of the host holds it open.
    while os.getppid() == host and not select.select([0], [], [], 1.0)[0]:
        pass
    for _ in range(_ROUNDS):
        left = find_left(token, host)
        if not left:
            return
        for process in left:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
